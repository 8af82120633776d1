"""Divides the files of a save among the ranks that hold their bytes.

Every rank computes the same partition from the same layouts, so ranks exchange no messages about it:

    runs      neighbouring bytes that the same ranks hold
    shares    a run, split among its holders at page boundaries so that in the end all ranks write equally much. Each
              page has one writer: two ranks that write to the same page would overwrite each other
    ranges    a share, cut into blocks of at most 16 MiB: the unit that is hashed and read back

Where a run ends in the middle of a page, the rank that writes the page receives the other bytes from the rank that
holds them (`save/page_exchange.py`). A range whose bytes depend on the CRCs of other ranks is late: it is written once
these are known.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from reprieve.checkpoint.buffers.block_pool import BLOCK_BYTES
from reprieve.checkpoint.buffers.gc_pause import collection_paused
from reprieve.checkpoint.format.layout import Deferred, FileLayout, Segment
from reprieve.storage.disk import PAGE

_MIN_SHARE_BYTES = 2**18
"""The smallest share that is worth a write of its own: below this size a disk takes longer to seek than to write."""


class WriteRange(NamedTuple):
    """Bytes [start, stop) of a file that one rank writes and hashes as one block. `start` is a multiple of PAGE."""

    start: int
    stop: int
    owner: int
    late: bool = False
    """The bytes depend on CRCs that other ranks compute."""


@dataclass(slots=True)
class FileShare:
    """One file of a save, with all its ranges and those that this rank writes."""

    layout: FileLayout
    ranges: list[WriteRange]
    """The ranges of all ranks, in the order of the file."""
    rank: int
    """This rank."""
    own_ranges: list[WriteRange] = field(init=False, repr=False)
    """The ranges of this rank."""

    def __post_init__(self) -> None:
        self.own_ranges = [write_range for write_range in self.ranges if write_range.owner == self.rank]

    @property
    def is_sole_writer(self) -> bool:
        """Whether this rank writes the whole file."""
        return len(self.own_ranges) == len(self.ranges)

    @property
    def creates_file(self) -> bool:
        """Whether this rank creates the file."""
        return not self.layout.is_shared or self.rank == 0

    @property
    def writes_end(self) -> bool:
        """Whether this rank writes the last byte and sets the file's size."""
        return self.ranges[-1].owner == self.rank if self.ranges else self.creates_file


def whole_file(layout: FileLayout, rank: int = 0) -> FileShare:
    """Return the share of a rank that writes a file alone."""
    return FileShare(layout, list(_blocks(0, layout.size, rank)), rank)


def partition_files(layouts: Sequence[FileLayout], rank: int, world_size: int) -> list[FileShare]:
    """Divide the files of a save. For files that all ranks write, the result is the same on every rank."""
    with collection_paused():
        shares: dict[int, list[_Share]] = {index: [] for index, layout in enumerate(layouts) if layout.is_shared}
        runs = [(index, run) for index in shares for run in _runs(layouts[index], world_size)]
        load = [0] * world_size
        # Runs with a single holder come first. The largest of the others come last: they even out the loads.
        for index, run in sorted(runs, key=lambda item: (len(item[1].holders) > 1, item[1].stop - item[1].start)):
            shares[index] += _split(run, load)
        return [
            FileShare(layout, _cut(layout, _merged(shares[index])), rank)
            if index in shares
            else whole_file(layout, rank)
            for index, layout in enumerate(layouts)
        ]


def blocks_needed(shares: Sequence[FileShare]) -> int:
    """Count the memory blocks that hold everything that one rank writes, except late ranges."""
    count, used = 0, BLOCK_BYTES
    for share in shares:
        for write_range in share.own_ranges:
            if write_range.late:
                continue
            if used + write_range.stop - write_range.start > BLOCK_BYTES:
                count, used = count + 1, 0
            used = _page_up(used + write_range.stop - write_range.start)
    return count


@dataclass(frozen=True, slots=True)
class _Run:
    """Pages [start, stop) of a file whose bytes the same ranks hold, except at both ends."""

    start: int
    stop: int
    holders: Sequence[int]


class _Share(NamedTuple):
    """Bytes [start, stop) of a file that one rank writes."""

    start: int
    stop: int
    owner: int


class _IsolatedPages(NamedTuple):
    """Pages [start, stop) of a file that become ranges of their own."""

    start: int
    stop: int
    late: bool


def _runs(layout: FileLayout, world_size: int) -> list[_Run]:
    """Group neighbouring segments with the same holders. A few bytes that all ranks hold join the run before them."""
    starts: list[int] = []
    holders: list[tuple[int, ...] | None] = []
    held_by_all = 0
    for segment in layout.segments:
        segment_holders = segment.holders if isinstance(segment, Segment) else None
        held_by_all = held_by_all + segment.length if segment_holders is None else 0
        differs = not holders or segment_holders != holders[-1]
        if not starts or (differs and (segment_holders is not None or held_by_all >= _MIN_SHARE_BYTES)):
            # A page that two runs share joins the run that has more of it.
            starts.append(min((segment.offset + PAGE // 2) // PAGE * PAGE, layout.size))
            holders.append(segment_holders)
    return [
        _Run(start, stop, range(world_size) if run_holders is None else run_holders)
        for (start, stop), run_holders in zip(pairwise([*starts, layout.size]), holders, strict=True)
        if start < stop
    ]


def _split(run: _Run, load: list[int]) -> list[_Share]:
    """Split a run by whole pages, so that its writers end up with equal loads. Adds to `load`, in bytes per rank."""
    writers = _writers(run, load)
    total = run.stop - run.start + sum(load[rank] for rank in writers)
    shares = []
    start, scaled_stop = run.start, 0
    for number, rank in enumerate(writers, 1):
        # Scaled by the number of writers: integers are the same on every machine.
        scaled_stop += total - len(writers) * load[rank]
        stop = run.start + scaled_stop // (len(writers) * PAGE) * PAGE if number < len(writers) else run.stop
        shares.append(_Share(start, stop, rank))
        load[rank] += stop - start
        start = stop
    return shares


def _writers(run: _Run, load: Sequence[int]) -> list[int]:
    """Choose the holders with the smallest loads, as many as get at least `_MIN_SHARE_BYTES` each."""
    by_load = sorted(run.holders, key=lambda rank: (load[rank], rank))
    writers = by_load[:1]
    total = run.stop - run.start + load[by_load[0]]
    for rank in by_load[1:]:
        if (total + load[rank]) // (len(writers) + 1) - load[rank] < _MIN_SHARE_BYTES:
            break
        writers.append(rank)
        total += load[rank]
    return sorted(writers)


def _merged(shares: list[_Share]) -> list[_Share]:
    """Sort the shares of a file and merge neighbours with the same owner."""
    merged: list[_Share] = []
    for share in sorted(shares):
        if merged and merged[-1].owner == share.owner:
            merged[-1] = merged[-1]._replace(stop=share.stop)
        else:
            merged.append(share)
    return merged


def _cut(layout: FileLayout, shares: list[_Share]) -> list[WriteRange]:
    """Cut the shares of a file into ranges, around isolated pages and at every 16 MiB."""
    isolated = _isolated_pages(layout, shares)
    ranges: list[WriteRange] = []
    for share in shares:
        end = share.start
        for pages in _overlapping(isolated, share):
            start, stop = max(pages.start, share.start), min(pages.stop, share.stop)
            ranges += _blocks(end, start, share.owner)
            ranges += _blocks(start, stop, share.owner, late=pages.late)
            end = stop
        ranges += _blocks(end, share.stop, share.owner)
    return ranges


def _overlapping(isolated: Sequence[_IsolatedPages], share: _Share) -> Iterator[_IsolatedPages]:
    index = bisect_right(isolated, share.start, key=lambda pages: pages.stop)
    while index < len(isolated) and isolated[index].start < share.stop:
        yield isolated[index]
        index += 1


def _isolated_pages(layout: FileLayout, shares: list[_Share]) -> list[_IsolatedPages]:
    """Find the pages that become ranges of their own, in the order of the file.

    Pages are late, and isolated, if their bytes depend on the CRCs of other ranks. In a file of shards, pages that
    several ranks read at a restore are isolated too: the page where one shard ends and the next begins, and what lies
    between tensors (headers, an optimizer's counters). Otherwise a rank would read a neighbour's whole shard for them.
    """
    isolated: list[_IsolatedPages] = []
    has_several_writers = len(shares) > 1
    foreign_crcs = _foreign_crcs(layout, shares) if has_several_writers else set()
    is_sharded = any(isinstance(segment, Segment) and segment.holders is not None for segment in layout.segments)
    for segment in layout.segments:
        start, stop = segment.offset, segment.offset + segment.length
        if isinstance(segment, Deferred):
            late = has_several_writers and (segment.needs is None or segment.needs in foreign_crcs)
            if late or is_sharded:
                _isolate(isolated, start, stop, late=late)
        elif is_sharded and segment.holders is None and segment.length < _MIN_SHARE_BYTES:
            _isolate(isolated, start, stop)
        elif is_sharded and start % PAGE:
            _isolate(isolated, start, start + 1)
    return isolated


def _foreign_crcs(layout: FileLayout, shares: list[_Share]) -> set[int]:
    """Find the CRCs that no rank can compute alone, because several ranks write the record or what follows it."""
    foreign: set[int] = set()
    writers: dict[int, int] = {}
    index = 0
    for segment in layout.segments:
        while shares[index].stop <= segment.offset:
            index += 1
        share = shares[index]
        crc = segment.crc if isinstance(segment, Segment) else segment.needs
        if crc is None:
            continue
        if segment.offset + segment.length > share.stop or writers.setdefault(crc, share.owner) != share.owner:
            foreign.add(crc)
    return foreign


def _isolate(isolated: list[_IsolatedPages], start: int, stop: int, *, late: bool = False) -> None:
    """Add the pages of bytes [start, stop), which lie behind those before. A page is late if any byte in it is."""
    first, last = start // PAGE * PAGE, _page_up(stop)
    if isolated and first < isolated[-1].stop:  # both have bytes in the same page
        previous = isolated.pop()
        if late == previous.late:
            first, last = previous.start, max(last, previous.stop)
        elif previous.late:
            isolated.append(previous)
            first = previous.stop
        elif previous.start < first:
            isolated.append(previous._replace(stop=first))
    if first < last:
        isolated.append(_IsolatedPages(first, last, late))


def _blocks(start: int, stop: int, owner: int, *, late: bool = False) -> Iterator[WriteRange]:
    for first in range(start, stop, BLOCK_BYTES):
        yield WriteRange(first, min(first + BLOCK_BYTES, stop), owner, late)


def _page_up(offset: int) -> int:
    return -(-offset // PAGE) * PAGE
