"""What identifies this machine."""

from __future__ import annotations

from pathlib import Path


def boot_id() -> str:
    """Return the kernel's id of the current boot. Process ids are only comparable within one boot."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return "unknown"
