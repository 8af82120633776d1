"""How much memory this process may still take: the machine's, or its cgroups' where that is less."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath


def available_bytes(root: Path = Path("/")) -> int:
    """Bytes that can be taken without reclaiming anybody's working set."""
    rooms = [_machine(root)]
    for group, limit, usage in _groups(root):
        most, used = _number(group / limit), _number(group / usage)
        if most is not None and used is not None:
            # The page cache counts as usage, and its inactive part goes first under pressure.
            stat = group / "memory.stat"
            cache = _field(stat, "total_inactive_file") or _field(stat, "inactive_file") or 0
            rooms.append(most - used + cache)
    return max(0, min(rooms))


def _groups(root: Path) -> Iterator[tuple[Path, str, str]]:
    """Our memory cgroups of both versions, each with those above it: any of them can have the limit."""
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
    for place in (top, top / "unified"):
        for folder in _with_parents(paths[""]):
            yield place / folder, *v2
    for folder in _with_parents(paths["memory"]):
        yield top / "memory" / folder, *v1


def _with_parents(path: str) -> Iterator[str]:
    inside = PurePosixPath(path.lstrip("/"))
    if ".." not in inside.parts:
        yield from (str(folder) for folder in (inside, *inside.parents))
    else:
        yield "."


def _machine(root: Path) -> int:
    kilobytes = _field(root / "proc/meminfo", "MemAvailable:")
    return kilobytes * 1024 if kilobytes is not None else 0


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None  # "max" means no limit


def _field(path: Path, name: str) -> int | None:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        key, _, rest = line.partition(" ")
        if key == name:
            return int(rest.split()[0])
    return None
