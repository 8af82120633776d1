"""How much memory this process may still take: the machine's, or its cgroup's where that is less."""

from __future__ import annotations

from pathlib import Path


def available_bytes(root: Path = Path("/")) -> int:
    """Bytes that can be taken without reclaiming anybody's working set."""
    rooms = [_machine(root)]
    for limit, usage, inactive in (
        ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory.current", "sys/fs/cgroup/memory.stat"),
        (
            "sys/fs/cgroup/memory/memory.limit_in_bytes",
            "sys/fs/cgroup/memory/memory.usage_in_bytes",
            "sys/fs/cgroup/memory/memory.stat",
        ),
    ):
        most, used = _number(root / limit), _number(root / usage)
        if most is not None and used is not None:
            # The page cache counts as usage, and its inactive part goes first under pressure.
            cache = _field(root / inactive, "total_inactive_file") or _field(root / inactive, "inactive_file") or 0
            rooms.append(most - used + cache)
    return max(0, min(rooms))


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
