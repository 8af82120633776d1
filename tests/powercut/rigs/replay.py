"""Makes crash states from a recorder's log: each is mounted, its journal replayed, and given to a check.

For a crash after any entry of the log the disk holds all writes up to the last flush before it, and of the writes
since then

- all, in order (every prefix of the log), or
- a random subset, of whole writes or of their 4 KiB blocks: a disk may reorder and tear writes that were not flushed,
  but not within a single block.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from tests.powercut.rigs.kernel import new_image
from tests.powercut.rigs.loopfs import LoopDisk
from tests.powercut.rigs.recorder import Entry, Flush, Mark, Write

BLOCK = 4096
# Few, half and most of the unflushed writes kept: "all but one" finds other faults than "only one".
KEEP_CHANCES = (0.1, 0.5, 0.9)


@dataclass(frozen=True, order=True)
class CrashState:
    """A crash after log[:point]: log[:flushed] is on the disk and, of what follows, the pieces `kept`."""

    point: int
    flushed: int
    kept: tuple[tuple[int, int, int], ...]
    """(index of the write in the log, first byte, end byte)"""
    marks: tuple[str, ...]
    """The marks before the crash, in order: what the test knows had happened."""

    def __str__(self) -> str:
        pieces = ", ".join(f"{index}[{first}:{end}]" for index, first, end in self.kept)
        return f"crash after {self.point} log entries, {self.flushed} flushed, kept of the rest: {pieces or 'nothing'}"


@dataclass(frozen=True)
class Outcome:
    states: int
    subsets: int
    """Those of them that are no prefix of the log."""
    failures: list[tuple[CrashState, Exception]]


def check_crashes(
    log: Sequence[Entry],
    base: bytes,
    check: Callable[[Path, CrashState], None],
    *,
    since: str | None = None,
    prefixes: bool = True,
    subsets: int = 1000,
    seed: int = 0,
) -> Outcome:
    """Mount every crash state and call check(path, state), which raises if the state is not as it should be.

    `since`: only crashes after this mark. `subsets`: how many random ones; fewer if there are not so many.
    """
    failures: list[tuple[CrashState, Exception]] = []
    count = torn = 0
    disk = LoopDisk(image_fd=new_image(0))
    try:
        for state, image in images(log, base, since=since, prefixes=prefixes, subsets=subsets, seed=seed):
            count += 1
            torn += state != whole(log, state)
            disk.insert(image)
            try:
                disk.mount()
            except OSError as error:  # ext4 itself is at a loss, or the model of the disk is wrong
                raise RuntimeError(f"cannot mount: {state}") from error
            try:
                check(disk.path, state)
            except Exception as error:  # noqa: BLE001 - whatever the check raises is its verdict
                # Without the frames: they would keep files on the disk open.
                failures.append((state, error.with_traceback(None)))
            disk.unmount()
    finally:
        disk.close()
    return Outcome(count, torn, failures)


def images(
    log: Sequence[Entry],
    base: bytes,
    *,
    since: str | None = None,
    prefixes: bool = True,
    subsets: int = 1000,
    seed: int = 0,
) -> Iterator[tuple[CrashState, int]]:
    """Each crash state with its image, as the fd of a memfd that the caller closes."""
    points = list(crash_points(log, since))
    states = {whole(log, state) for state in points} if prefixes else set()
    states |= random_subsets(log, points, subsets, random.Random(seed))
    platter = Platter(base)
    done = 0
    for state in sorted(states):
        for entry in log[done : state.flushed]:
            if isinstance(entry, Write):
                platter.write(entry.offset, entry.data)
        done = max(done, state.flushed)
        yield state, platter.image(pieces(log, state))


def crash_points(log: Sequence[Entry], since: str | None) -> Iterator[CrashState]:
    """A state without pieces for each moment just before a write, and for the end.

    Just before, because a flush or a mark changes nothing on the disk but asks more of it.
    """
    flushed, marks, begun = 0, [], since is None
    for index, entry in enumerate(log):
        if isinstance(entry, Flush):
            flushed = index + 1
        elif isinstance(entry, Mark):
            marks.append(entry.text)
            begun = begun or entry.text == since
        elif begun:
            yield CrashState(index, flushed, (), tuple(marks))
    if not begun:
        raise ValueError(f"no mark {since!r} in the log")
    yield CrashState(len(log), flushed, (), tuple(marks))


def pending(log: Sequence[Entry], state: CrashState) -> Iterator[tuple[int, int, int]]:
    for index in range(state.flushed, state.point):
        entry = log[index]
        if isinstance(entry, Write):
            yield index, 0, len(entry.data)


def whole(log: Sequence[Entry], state: CrashState) -> CrashState:
    return CrashState(state.point, state.flushed, tuple(pending(log, state)), state.marks)


def random_subsets(
    log: Sequence[Entry], points: Sequence[CrashState], count: int, rng: random.Random
) -> set[CrashState]:
    """About `count` different ones, more at points with more unflushed writes."""
    weights = [sum(1 for _ in pending(log, point)) for point in points]
    found: set[CrashState] = set()
    if not any(weights):
        return found
    for point in rng.choices(points, weights, k=4 * count):
        units = list(pending(log, point))
        if rng.random() < 0.5:
            units = [block for unit in units for block in blocks(unit)]
        chance = rng.choice(KEEP_CHANCES)
        kept = tuple(unit for unit in units if rng.random() < chance)
        found.add(CrashState(point.point, point.flushed, kept, point.marks))
        if len(found) == count:
            break
    return found


def blocks(unit: tuple[int, int, int]) -> Iterator[tuple[int, int, int]]:
    index, first, end = unit
    for at in range(first, end, BLOCK):
        yield index, at, min(at + BLOCK, end)


def pieces(log: Sequence[Entry], state: CrashState) -> Iterator[tuple[int, bytes]]:
    for index, first, end in state.kept:
        entry = log[index]
        assert isinstance(entry, Write)
        yield entry.offset + first, entry.data[first:end]


class Platter:
    """What is certainly on the disk. Only blocks that are not zero are copied into an image: few, on a small ext4."""

    def __init__(self, base: bytes) -> None:
        self._bytes = bytearray(base)
        zeros = bytes(BLOCK)
        self._used = {at for at in range(0, len(base), BLOCK) if base[at : at + BLOCK] != zeros}
        self._runs: list[tuple[int, int]] | None = None

    def write(self, offset: int, data: bytes) -> None:
        self._bytes[offset : offset + len(data)] = data
        self._used.update(range(offset // BLOCK * BLOCK, offset + len(data), BLOCK))
        self._runs = None

    def image(self, more: Iterator[tuple[int, bytes]]) -> int:
        """A new image of it, with more writes on top in their order."""
        fd = new_image(len(self._bytes))
        view = memoryview(self._bytes)
        if self._runs is None:
            self._runs = list(runs(sorted(self._used)))
        for first, end in self._runs:
            os.pwrite(fd, view[first:end], first)
        for offset, data in more:
            os.pwrite(fd, data, offset)
        return fd


def runs(starts: Sequence[int]) -> Iterator[tuple[int, int]]:
    for _, group in groupby(enumerate(starts), lambda pair: pair[1] - pair[0] * BLOCK):
        members = [start for _, start in group]
        yield members[0], members[-1] + BLOCK
