"""Who writes which bytes: the files of a save divided among the ranks that hold them.

Every rank works out the same division from the same layout, so nothing need be said about it:

    runs      neighbouring bytes that the same ranks hold
    shares    a run split evenly among its holders, by whole pages: each page of a disk has one writer, because two
              that write one page overwrite each other
    pieces    a share in blocks of at most 16 MiB: the unit that is hashed, and read back

Where a run ends in the middle of a page, the page's owner gets the rest of its bytes from the rank that holds them
(`edges.py`). A piece whose bytes follow from the CRCs of other ranks is late: it is written when these are known.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from reprieve.checkpoint.blocks import BLOCK_BYTES
from reprieve.checkpoint.layout import Deferred, FileLayout, Segment
from reprieve.storage.disk import PAGE

_SHARE_BYTES = 2**18
"""Less is not worth a write of its own: at this size the disk takes longer to find its place than to write."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes [start, stop) of a file, written by one rank and hashed as one block. `start` is a whole page."""

    start: int
    stop: int
    owner: int
    late: bool = False


@dataclass(slots=True)
class FilePart:
    """One file of a save as one rank sees it."""

    layout: FileLayout
    pieces: list[Piece]
    """All of them, in order."""
    rank: int
    """Ours."""
    foreign_crcs: frozenset[int] = frozenset()
    """CRCs of records of which no single rank writes all."""

    @property
    def mine(self) -> list[Piece]:
        return [piece for piece in self.pieces if piece.owner == self.rank]

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


def whole(layout: FileLayout, rank: int = 0) -> FilePart:
    """A file that one rank writes alone."""
    return FilePart(layout, list(_blocks(0, layout.size, rank)), rank)


def divide(layouts: Sequence[FileLayout], rank: int, world_size: int) -> list[FilePart]:
    """The parts of a save's files. Those that every rank has come out the same on every rank."""
    load = [0] * world_size
    return [_divide(layout, rank, load) if layout.by_all else whole(layout, rank) for layout in layouts]


def blocks_needed(parts: Sequence[FilePart]) -> int:
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


def _divide(layout: FileLayout, rank: int, load: list[int]) -> FilePart:
    shares: list[tuple[int, int, int]] = []
    for start, stop, holders in _runs(layout.segments):
        # A page goes with its first byte.
        first, last = _page_up(start), min(_page_up(stop), layout.size)
        if first < last:
            shares += _split(first, last, range(len(load)) if holders is None else holders, load)
    shares = _joined(shares)
    owners = _Owners(shares)
    foreign = _foreign_crcs(layout, owners)
    apart = _set_apart(layout, owners, foreign)
    pieces: list[Piece] = []
    for number, (start, stop, owner) in enumerate(shares):
        at = start
        for first, last, late in apart.get(number, ()):
            pieces += _blocks(at, first, owner)
            pieces += _blocks(first, last, owner, late=late)
            at = last
        pieces += _blocks(at, stop, owner)
    return FilePart(layout, pieces, rank, foreign)


class _Owners:
    """Who writes which bytes of a file."""

    def __init__(self, shares: list[tuple[int, int, int]]) -> None:
        self.shares = shares
        self._starts = [share[0] for share in shares]

    def numbers(self, start: int, stop: int) -> range:
        """Which shares these bytes are in."""
        return range(bisect_right(self._starts, start) - 1, bisect_right(self._starts, stop - 1))

    def of(self, segment: Segment | Deferred) -> set[int]:
        numbers = self.numbers(segment.offset, segment.offset + segment.length)
        return {self.shares[number][2] for number in numbers}


def _runs(segments: Sequence[Segment | Deferred]) -> Iterator[tuple[int, int, tuple[int, ...] | None]]:
    """Neighbouring bytes with the same holders. A little that everybody holds goes with what is before it."""
    start, stop, holders, glue = 0, 0, None, 0
    for segment in segments:
        its = segment.holders if isinstance(segment, Segment) else None
        glue = glue + segment.length if its is None else 0
        if its != holders and (its is not None or glue >= _SHARE_BYTES):
            if stop > start:
                yield start, stop, holders
            start, holders = segment.offset, its
        stop = segment.offset + segment.length
    if stop > start:
        yield start, stop, holders


def _split(first: int, last: int, holders: Sequence[int], load: list[int]) -> list[tuple[int, int, int]]:
    """Even parts, in whole pages, to those of the holders that have least to write so far."""
    pages = -(-(last - first) // PAGE)
    count = max(1, min(len(holders), pages * PAGE // _SHARE_BYTES))
    chosen = sorted(sorted(holders, key=lambda rank: (load[rank], rank))[:count])
    shares = []
    for number, rank in enumerate(chosen):
        start = first + number * pages // count * PAGE
        stop = min(first + (number + 1) * pages // count * PAGE, last)
        shares.append((start, stop, rank))
        load[rank] += stop - start
    return shares


def _joined(shares: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    out: list[tuple[int, int, int]] = []
    for start, stop, owner in shares:
        if out and out[-1][2] == owner:
            out[-1] = (out[-1][0], stop, owner)
        else:
            out.append((start, stop, owner))
    return out


def _foreign_crcs(layout: FileLayout, owners: _Owners) -> frozenset[int]:
    """CRCs that no rank can work out alone: several write the record, or another one writes what follows it."""
    writers: dict[int, set[int]] = {}
    for segment in layout.segments:
        if isinstance(segment, Segment) and segment.crc >= 0:
            writers.setdefault(segment.crc, set()).update(owners.of(segment))
    for segment in layout.segments:
        if isinstance(segment, Deferred) and segment.needs in writers:
            writers[segment.needs].update(owners.of(segment))
    return frozenset(crc for crc, ranks in writers.items() if len(ranks) > 1)


def _set_apart(layout: FileLayout, owners: _Owners, foreign: frozenset[int]) -> dict[int, list[tuple[int, int, bool]]]:
    """By the number of the share, the pages in it that become pieces of their own, and whether they are late.

    They are those whose bytes wait for the CRCs of other ranks. And, where a file is made of shards, what several ranks
    need when they read it back: the page where one shard ends and the next begins, and what is between tensors
    (headers, an optimizer's counters). Nobody should have to read the whole shard of a neighbour for it.
    """
    apart: dict[int, list[tuple[int, int, bool]]] = {}

    def mark(start: int, stop: int, *, late: bool = False) -> None:
        for number in owners.numbers(start, stop):
            first = max(owners.shares[number][0], start // PAGE * PAGE)
            last = min(owners.shares[number][1], _page_up(stop))
            pages = apart.setdefault(number, [])
            if pages and first < pages[-1][1]:
                pages[-1] = (pages[-1][0], max(pages[-1][1], last), pages[-1][2] or late)
            else:
                pages.append((first, last, late))

    spread = any(isinstance(segment, Segment) and segment.holders is not None for segment in layout.segments)
    for segment in layout.segments:
        start, stop = segment.offset, segment.offset + segment.length
        if isinstance(segment, Deferred):
            late = len(owners.shares) > 1 and (segment.needs is None or segment.needs in foreign)
            if late or spread:
                mark(start, stop, late=late)
        elif spread and segment.holders is None and segment.length < _SHARE_BYTES:
            mark(start, stop)
        elif spread and start % PAGE:
            mark(start, start + 1)
    return apart


def _blocks(start: int, stop: int, owner: int, *, late: bool = False) -> Iterator[Piece]:
    for first in range(start, stop, BLOCK_BYTES):
        yield Piece(first, min(first + BLOCK_BYTES, stop), owner, late)


def _page_up(offset: int) -> int:
    return -(-offset // PAGE) * PAGE
