"""Who writes which bytes: the files of a save divided among the ranks that hold them.

Every rank works out the same division from the same layout, so nothing need be said about it:

    runs      neighbouring bytes that the same ranks hold
    shares    a run split among its holders by whole pages, so that all ranks write the same in the end: each page of a
              disk has one writer, because two that write one page overwrite each other
    pieces    a share in blocks of at most 16 MiB: the unit that is hashed, and read back

Where a run ends in the middle of a page, the page's owner gets the rest of its bytes from the rank that holds them
(`edges.py`). A piece whose bytes follow from the CRCs of other ranks is late: it is written when these are known.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from reprieve.checkpoint.buffers.block_pool import BLOCK_BYTES
from reprieve.checkpoint.buffers.gc_pause import collection_paused
from reprieve.checkpoint.format.layout import Deferred, FileLayout, Segment
from reprieve.storage.disk import PAGE

_SHARE_BYTES = 2**18
"""Less is not worth a write of its own: at this size the disk takes longer to find its place than to write."""
_ZIP_TAIL = 2**16 + 2**10
"""What readers of a zip look through to find its directory: a comment may be 64 KiB long."""


class WriteRange(NamedTuple):
    """Bytes [start, stop) of a file, written by one rank and hashed as one block. `start` is a whole page."""

    start: int
    stop: int
    owner: int
    late: bool = False


@dataclass(slots=True)
class FileShare:
    """One file of a save as one rank sees it."""

    layout: FileLayout
    pieces: list[WriteRange]
    """All of them, in order."""
    rank: int
    """Ours."""
    mine: list[WriteRange] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.mine = [piece for piece in self.pieces if piece.owner == self.rank]

    @property
    def alone(self) -> bool:
        """Is it this rank that writes all of it?"""
        return len(self.mine) == len(self.pieces)

    @property
    def creates(self) -> bool:
        """Is it this rank that makes the file?"""
        return not self.layout.by_all or self.rank == 0

    @property
    def ends(self) -> bool:
        """Is it this rank that writes the last byte, and sets the file's size?"""
        return self.pieces[-1].owner == self.rank if self.pieces else self.creates


def whole(layout: FileLayout, rank: int = 0) -> FileShare:
    """A file that one rank writes alone."""
    return FileShare(layout, list(_blocks(0, layout.size, rank)), rank)


def partition_files(layouts: Sequence[FileLayout], rank: int, world_size: int) -> list[FileShare]:
    """The parts of a save's files. Those that every rank has come out the same on every rank."""
    with collection_paused():
        shares: dict[int, list[Share]] = {number: [] for number, layout in enumerate(layouts) if layout.by_all}
        runs = [(number, run) for number in shares for run in _runs(layouts[number], world_size)]
        load = [0] * world_size
        # What only one rank can write comes first, the largest runs last: they make even what the others left uneven.
        for number, run in sorted(runs, key=lambda item: (len(item[1].holders) > 1, item[1].stop - item[1].start)):
            shares[number] += _split(run, load)
        return [
            _part(layout, sorted(shares[number]), rank) if number in shares else whole(layout, rank)
            for number, layout in enumerate(layouts)
        ]


def blocks_needed(parts: Sequence[FileShare]) -> int:
    """Blocks of memory that hold all that one rank writes, but for what is late."""
    count, used = 0, BLOCK_BYTES
    for part in parts:
        for piece in part.mine:
            if piece.late:
                continue
            if used + piece.stop - piece.start > BLOCK_BYTES:
                count, used = count + 1, 0
            used = _page_up(used + piece.stop - piece.start)
    return count


Share = tuple[int, int, int]
"""Bytes [start, stop) of a file, and the rank that writes them."""


@dataclass(frozen=True, slots=True)
class _Run:
    """Pages [start, stop) of a file, whose bytes these ranks hold, but for the edges."""

    start: int
    stop: int
    holders: Sequence[int]


def _part(layout: FileLayout, shares: list[Share], rank: int) -> FileShare:
    shares = _joined(shares)
    apart = _set_apart(layout, shares)
    pieces: list[WriteRange] = []
    number = 0
    for start, stop, owner in shares:
        at = start
        while number < len(apart) and apart[number][0] < stop:
            first, last, late = max(apart[number][0], start), min(apart[number][1], stop), apart[number][2]
            pieces += _blocks(at, first, owner)
            pieces += _blocks(first, last, owner, late=late)
            at = last
            if apart[number][1] > stop:
                break
            number += 1
        pieces += _blocks(at, stop, owner)
    return FileShare(layout, pieces, rank)


def _runs(layout: FileLayout, world_size: int) -> list[_Run]:
    """Neighbouring bytes with the same holders. A little that everybody holds goes with what is before it."""
    starts: list[int] = []
    holders: list[tuple[int, ...] | None] = []
    glue = 0
    for segment in layout.segments:
        its = segment.holders if isinstance(segment, Segment) else None
        glue = glue + segment.length if its is None else 0
        if not starts or (its != holders[-1] and (its is not None or glue >= _SHARE_BYTES)):
            # A page that two runs share goes with the one that has more of it.
            starts.append(min((segment.offset + PAGE // 2) // PAGE * PAGE, layout.size))
            holders.append(its)
    return [
        _Run(start, stop, range(world_size) if its is None else its)
        for (start, stop), its in zip(pairwise([*starts, layout.size]), holders, strict=True)
        if start < stop
    ]


def _split(run: _Run, load: list[int]) -> list[Share]:
    """Parts in whole pages for those of the holders that have least to write so far: then they have the same."""
    size = run.stop - run.start
    chosen = sorted(run.holders, key=lambda rank: (load[rank], rank)) if len(run.holders) > 1 else run.holders
    count, in_all = 1, size + load[chosen[0]]
    while count < len(chosen):
        its = load[chosen[count]]
        if (in_all + its) // (count + 1) - its < _SHARE_BYTES:
            break
        count, in_all = count + 1, in_all + its
    shares = []
    at, due = run.start, 0
    for number, rank in enumerate(sorted(chosen[:count]), 1):
        due += in_all - count * load[rank]  # times count: whole numbers are the same on every machine
        stop = run.start + due // (count * PAGE) * PAGE if number < count else run.stop
        shares.append((at, stop, rank))
        load[rank] += stop - at
        at = stop
    return shares


def _joined(shares: list[Share]) -> list[Share]:
    out: list[Share] = []
    for start, stop, owner in shares:
        if out and out[-1][2] == owner:
            out[-1] = (out[-1][0], stop, owner)
        else:
            out.append((start, stop, owner))
    return out


def _foreign_crcs(layout: FileLayout, shares: list[Share]) -> set[int]:
    """CRCs that no rank can work out alone: several write the record, or another one writes what follows it."""
    foreign: set[int] = set()
    writers: dict[int, int] = {}
    number = 0
    for segment in layout.segments:
        while shares[number][1] <= segment.offset:
            number += 1
        _, stop, owner = shares[number]
        crc = segment.crc if isinstance(segment, Segment) else segment.needs
        if crc is not None and (segment.offset + segment.length > stop or writers.setdefault(crc, owner) != owner):
            foreign.add(crc)
    return foreign


def _set_apart(layout: FileLayout, shares: list[Share]) -> list[tuple[int, int, bool]]:
    """Pages that become pieces of their own, in order, and whether they are late.

    They are those whose bytes wait for the CRCs of other ranks. And, where a file is made of shards, what several ranks
    need when they read it back: the page where one shard ends and the next begins, and what is between tensors
    (headers, an optimizer's counters). Nobody should have to read the whole shard of a neighbour for it.
    """
    apart: list[tuple[int, int, bool]] = []
    several = len(shares) > 1
    foreign = _foreign_crcs(layout, shares) if several else set()
    spread = any(isinstance(segment, Segment) and segment.holders is not None for segment in layout.segments)
    for segment in layout.segments:
        start, stop = segment.offset, segment.offset + segment.length
        if isinstance(segment, Deferred):
            late = several and (segment.needs is None or segment.needs in foreign)
            if late or spread:
                _mark(apart, start, stop, late=late)
        elif spread and segment.holders is None and segment.length < _SHARE_BYTES:
            _mark(apart, start, stop)
        elif spread and start % PAGE:
            _mark(apart, start, start + 1)
    return apart


def _mark(apart: list[tuple[int, int, bool]], start: int, stop: int, *, late: bool = False) -> None:
    first, last = start // PAGE * PAGE, _page_up(stop)
    if apart and first < apart[-1][1]:  # they meet in a page: it is late if one of them is
        start, stop, was_late = apart[-1]
        if late == was_late:
            first, last = start, max(last, stop)
            apart.pop()
        elif was_late:
            first = stop
        else:
            apart.pop()
            if start < first:
                apart.append((start, first, False))
    if first < last:
        apart.append((first, last, late))


def _blocks(start: int, stop: int, owner: int, *, late: bool = False) -> Iterator[WriteRange]:
    for first in range(start, stop, BLOCK_BYTES):
        yield WriteRange(first, min(first + BLOCK_BYTES, stop), owner, late)


def _page_up(offset: int) -> int:
    return -(-offset // PAGE) * PAGE
