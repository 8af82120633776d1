"""How many processes of this cgroup the kernel has killed because memory ran out.

A rank that the kernel kills leaves no word, and torchrun ends with 1 as after any failure. The launcher compares the
count before an attempt with the one after it, and logs the cause (`runs/outcome.py`). Where the kernel kills all
processes of a container together, as Kubernetes asks for under cgroup v2, the launcher goes with them.
"""

from __future__ import annotations

from pathlib import Path

from reprieve.checkpoint.buffers.available_memory import memory_cgroups, read_field


def count_memory_kills(root: Path = Path("/")) -> int | None:
    """Return the kernel's count since the cgroup was made; None on a machine without memory cgroups."""
    for group, _, _ in memory_cgroups(root):
        for name in ("memory.events", "memory.oom_control"):  # cgroup v2, v1
            if (count := read_field(group / name, "oom_kill")) is not None:
                return count
    return None
