"""What identifies the place where this process runs: the machine, and the pod on it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def boot_id() -> str:
    """Return the kernel's id of the current boot. Process ids are only comparable within one boot."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return "unknown"


def pid_namespace() -> str:
    """Return the id of this process's PID namespace: all processes of a container share one, and a new container has
    another. Pods of one node have the same boot id."""
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return "unknown"


def in_pod(env: Mapping[str, str] = os.environ) -> bool:
    return bool(env.get("KUBERNETES_SERVICE_HOST"))
