"""How much more memory this process may use.

That is what the machine has available, or what the process's cgroups still allow, where that is less. `staging` uses it
to decide whether a copy of the training state fits.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath


def available_bytes(root: Path = Path("/")) -> int:
    """Return the bytes that this process can use without reclaiming any process's working set."""
    limits = [_available_on_machine(root)]
    for group, limit_file, usage_file in memory_cgroups(root):
        limit, used = _number(group / limit_file), _number(group / usage_file)
        if limit is not None and used is not None:
            # The page cache counts as usage; the kernel reclaims its inactive part first.
            stat = group / "memory.stat"
            cache = read_field(stat, "total_inactive_file") or read_field(stat, "inactive_file") or 0
            limits.append(limit - used + cache)
    return max(0, min(limits))


def memory_cgroups(root: Path) -> Iterator[tuple[Path, str, str]]:
    """Yield the folder of each memory cgroup, v2 and v1, with its limit and usage files.

    Parents are included: any of them can set the limit. A folder need not exist.
    """
    top = root / "sys/fs/cgroup"
    v2, v1 = ("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")
    # In a container with a cgroup namespace of its own the path is "/".
    paths = {"": "/", "memory": "/"}
    try:
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            paths |= dict.fromkeys(controllers.split(","), path)
    except (OSError, ValueError):
        pass
    for mount in (top, top / "unified"):
        for folder in _with_parents(paths[""]):
            yield mount / folder, *v2
    for folder in _with_parents(paths["memory"]):
        yield top / "memory" / folder, *v1


def _with_parents(path: str) -> Iterator[str]:
    relative = PurePosixPath(path.lstrip("/"))
    if ".." not in relative.parts:
        yield from (str(folder) for folder in (relative, *relative.parents))
    else:
        yield "."


def _available_on_machine(root: Path) -> int:
    kilobytes = read_field(root / "proc/meminfo", "MemAvailable:")
    return kilobytes * 1024 if kilobytes is not None else 0


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None  # "max" means no limit


def read_field(path: Path, name: str) -> int | None:
    """Return a number from a file of lines `name number`; None if it is not there."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        key, _, rest = line.partition(" ")
        if key == name:
            return int(rest.split()[0])
    return None
