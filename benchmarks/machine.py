"""The machine of a measurement: without it the numbers mean nothing."""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def machine(folder: Path) -> dict[str, str | int | float]:
    return {
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "kernel": platform.release(),
        "fs": _file_system(folder),
    }


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in ("reprieve", "torch", "safetensors", "xxhash", "isal", "numpy", "transformers"):
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _file_system(folder: Path) -> str:
    """The type of the deepest mount that holds the folder."""
    path, kind = "", "unknown"
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, mount, this_kind, *_ = line.split()
        if folder.resolve().is_relative_to(mount) and len(mount) >= len(path):
            path, kind = mount, this_kind
    return kind
