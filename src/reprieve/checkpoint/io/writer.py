"""Writes file layouts to disk: bytes into blocks, checksums on the way, blocks to the disk, everything flushed.

    fill     source → block          the only part that touches the training state
    seal     bytes from other ranks, CRCs, deferred bytes, XXH3
    write    block → disk            a few threads; the interpreter lock is released in all three

A blocking save fills and seals half a megabyte at a time, while it is in the CPU's cache, and passes through a ring of
blocks. A background save fills all blocks first (that is the pause that training sees) and seals and writes later.

In a job of several ranks, each rank writes its ranges of each file (`partition.py`). Late ranges wait in memory for the
CRCs of other ranks: `write` returns what this rank knows of the CRCs, `complete` takes what all ranks know.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from reprieve.checkpoint.buffers.block_pool import BLOCK_BYTES, Block, BlockPool
from reprieve.checkpoint.buffers.cuda_streams import CopyStreams
from reprieve.checkpoint.buffers.thread_pool import ThreadPool
from reprieve.checkpoint.format.checksum import BlockHash, combined_crc, crc32
from reprieve.checkpoint.format.layout import Deferred, FileLayout, Segment, devices_of
from reprieve.checkpoint.format.manifest import FileEntry
from reprieve.checkpoint.io.partition import FileShare, WriteRange, whole_file
from reprieve.storage.disk import PAGE, Disk, OpenFile

WRITERS = 4
"""Threads that wait in `pwrite`. One is enough for some disks, four for all that were measured."""

_STRIDE = 2**19
"""Bytes that are copied and then hashed while still in the second-level cache: 4.4 GB/s against 2.6 by whole blocks."""

Crcs = dict[int, list[tuple[int, int, int]]]
"""For each CRC, by number: parts of its record as (offset in the file, length, CRC-32 of the part)."""

Received = Mapping[str, Sequence[tuple[int, bytes]]]
"""For each file: bytes from other ranks as (offset in the file, bytes), in order."""


@dataclass(slots=True, eq=False)
class _BlockBatch:
    """A block with the ranges in it, which go to the disk together."""

    block: Block
    placements: list[_Placement] = field(default_factory=list)
    used: int = 0

    def place(self, file: _File, write_range: WriteRange) -> _Placement | None:
        """Place a range at the next page of the block; return None if it does not fit."""
        if self.used + write_range.stop - write_range.start > BLOCK_BYTES:
            return None
        placement = _Placement(file, write_range, self, self.used)
        self.placements.append(placement)
        self.used = _page_up(self.used + write_range.stop - write_range.start)
        return placement


@dataclass(slots=True, eq=False)
class _Placement:
    """The place of a file's range in a block."""

    file: _File
    range: WriteRange
    batch: _BlockBatch
    offset: int
    """Where the range starts in the block."""

    def at(self, position: int) -> int:
        """Convert a position in the file to one in the block."""
        return self.offset + position - self.range.start

    def view(self, start: int, stop: int) -> memoryview:
        """Return the block's memory for bytes [start, stop) of the file."""
        return self.batch.block.view[self.at(start) : self.at(stop)]


class _File:
    """A file that is being written."""

    def __init__(self, share: FileShare) -> None:
        self.share = share
        self.layout = share.layout
        self.file: OpenFile | None = None
        self.digests: dict[int, str] = {}
        """The digest of each range, by its start."""
        self.crc_parts: Crcs = {}
        """What this rank knows of each CRC, in a file that several ranks write."""
        self.received: Sequence[tuple[int, bytes]] = ()
        self._is_sole_writer = share.is_sole_writer
        self._crcs = [0] * self.layout.crcs
        self._offsets = [segment.offset for segment in self.layout.segments]
        self._rendered: tuple[int, bytes] = (-1, b"")

    def fill(self, placement: _Placement, start: int, stop: int) -> None:
        """Copy bytes [start, stop) of the file into the block, as far as this rank holds them."""
        rank, block = self.share.rank, placement.batch.block
        for segment, first, last in self._overlapping(start, stop):
            if isinstance(segment, Segment) and (segment.holders is None or rank in segment.holders):
                assert segment.source is not None
                segment.source.copy(block, placement.at(segment.offset + first), first, last)

    def seal(self, placement: _Placement, start: int, stop: int) -> None:
        """Add received and deferred bytes, and compute CRCs. Called in the order of the file."""
        for segment, first, last in self._overlapping(start, stop):
            view = placement.view(segment.offset + first, segment.offset + last)
            if isinstance(segment, Deferred):
                if not placement.range.late:
                    view[:] = self._render(segment)[first:last]
                continue
            if segment.holders is not None and not segment.held_by(self.share.rank):
                self._put_received(view, segment.offset + first)
            if segment.crc >= 0:
                self._add_to_crc(segment.crc, segment.offset + first, view)

    def seal_late(self, placement: _Placement) -> None:
        """Add the deferred bytes of a late range, once `learn` has all CRCs."""
        for segment, first, last in self._overlapping(placement.range.start, placement.range.stop):
            if isinstance(segment, Deferred):
                view = placement.view(segment.offset + first, segment.offset + last)
                view[:] = self._render(segment)[first:last]

    def learn(self, crc_parts: Crcs) -> None:
        """Take what all ranks know of the CRCs."""
        for number, parts in crc_parts.items():
            self._crcs[number] = combined_crc(parts)

    def _overlapping(self, start: int, stop: int) -> Iterator[tuple[Segment | Deferred, int, int]]:
        """Yield the segments that overlap [start, stop), each with the range of its own bytes that does."""
        number = max(0, bisect_right(self._offsets, start) - 1)
        while number < len(self._offsets) and (segment := self.layout.segments[number]).offset < stop:
            first, last = max(0, start - segment.offset), min(stop - segment.offset, segment.length)
            if first < last:
                yield segment, first, last
            number += 1

    def _put_received(self, view: memoryview, start: int) -> None:
        """Fill `view`, the file's bytes from `start` on, with bytes from other ranks."""
        begin, stop = start, start + len(view)
        number = max(0, bisect_right(self.received, start, key=lambda item: item[0]) - 1)
        while number < len(self.received) and self.received[number][0] < stop:
            offset, data = self.received[number]
            first, last = max(start, offset), min(stop, offset + len(data))
            if first < last:
                assert first == start, f"{self.layout.name}: no rank sent bytes {start} to {first}"
                view[first - begin : last - begin] = data[first - offset : last - offset]
                start = last
            number += 1
        assert start == stop, f"{self.layout.name}: no rank sent bytes {start} to {stop}"

    def _add_to_crc(self, number: int, start: int, data: memoryview) -> None:
        if self._is_sole_writer:
            self._crcs[number] = crc32(data, self._crcs[number])
            return
        parts = self.crc_parts.setdefault(number, [])
        offset, length, crc = parts.pop() if parts and parts[-1][0] + parts[-1][1] == start else (start, 0, 0)
        # This is the CRC of the whole record, unless other ranks write parts of it. In that case everything that
        # depends on it is late and waits for `learn`.
        self._crcs[number] = crc32(data, crc)
        parts.append((offset, length + len(data), self._crcs[number]))

    def _render(self, segment: Deferred) -> bytes:
        if self._rendered[0] != segment.offset:
            self._rendered = (segment.offset, segment.render(self._crcs))
        return self._rendered[1]


class Writer:
    """Writer of the files of one save into a folder.

    A rank that writes alone calls `write_through`. One of several ranks calls `create`, `write` and `complete`, with an
    agreement of all ranks after each. `stage` comes before them in a background save: it runs on the thread that owns
    the training state, and the others may run on another one.
    """

    def __init__(
        self,
        disk: Disk,
        pool: BlockPool,
        folder: Path,
        files: Sequence[FileLayout | FileShare],
        *,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        self._disk = disk
        self._pool = pool
        self._folder = folder
        self._files = [_File(file if isinstance(file, FileShare) else whole_file(file)) for file in files]
        self._progress = progress
        self._failed = threading.Event()
        self._threads = ThreadPool(WRITERS, "reprieve-write")
        self._writes: list[Future[None]] = []
        self._staged: list[_Placement] | None = None
        self._batches: list[_BlockBatch] = []
        """Batches in blocks of the pool that are not on their way to the disk yet."""
        self._late_batches: list[_BlockBatch] = []

    def write_through(self) -> dict[str, FileEntry]:
        """Write all files through a ring of blocks; they are durable on return."""
        with self:
            self.create()
            self.write()
            digests = self.complete({})
        entries = {}
        for file in self._files:
            blocks = [digest for _, digest in sorted(digests[file.layout.name].items())]
            entries[file.layout.name] = FileEntry.of(file.layout.size, blocks)
        return entries

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Return blocks to the pool and close files. A second call does nothing."""
        self._failed.set()  # a write that is still queued must not reach a closed file
        self._threads.join()
        for batch in self._batches:
            self._pool.give(batch.block)
        self._batches.clear()
        self._late_batches.clear()
        for file in self._files:
            open_file, file.file = file.file, None
            if open_file is not None:
                self._disk.close(open_file)

    def create(self) -> None:
        """Create the files that this rank creates. A full disk fails here, before the first byte is written."""
        # All files before the first write: reserving room takes 20 times as long beside running writes.
        for file in self._files:
            if file.share.creates_file and file.file is None:
                file.file = self._disk.create(self._folder / file.layout.name, file.layout.size)

    def stage(self) -> None:
        """Copy the state into blocks. When this returns, training may change the state."""
        try:
            self._staged = []
            with self._copy_streams() as streams:
                for placement in self._placements():
                    placement.file.fill(placement, placement.range.start, placement.range.stop)
                    self._staged.append(placement)
                streams.wait()
        except BaseException:
            self.close()
            raise

    def write(self, received: Received | None = None) -> dict[str, Crcs]:
        """Write every range that is not late; return what this rank knows of the CRCs, for the other ranks."""
        for file in self._files:
            file.received = (received or {}).get(file.layout.name, ())
            if file.file is None and file.share.own_ranges:
                file.file = self._disk.open(self._folder / file.layout.name)
        if self._staged is not None:
            for placement in self._staged:
                self._seal_staged(placement)
            self._staged = None
        else:
            with self._copy_streams() as streams:
                for placement in self._placements():
                    self._fill_and_seal(placement, streams)
        for batch in list(self._batches):
            self._submit(batch)
        self._wait()
        # Also of whole records: the rank that writes the zip directory repeats all CRCs there.
        return {file.layout.name: file.crc_parts for file in self._files if file.crc_parts}

    def complete(self, crcs: Mapping[str, Crcs]) -> dict[str, dict[int, str]]:
        """Write late ranges and flush: all files are durable on return. Return each file's digests by offset."""
        for file in self._files:
            file.learn(crcs.get(file.layout.name, {}))
        for batch in self._late_batches:
            for placement in batch.placements:
                placement.file.seal_late(placement)
            # Late ranges are single pages far apart: a disk writes several of these in the time of one.
            per_thread = -(-len(batch.placements) // WRITERS)
            for first in range(0, len(batch.placements), per_thread):
                self._submit(_BlockBatch(batch.block, batch.placements[first : first + per_thread]))
        self._wait()
        # The flushes of all files go out together: the journal commits once for most of them.
        for flush in [self._threads.submit(partial(self._flush, file)) for file in self._files if file.file]:
            flush.result()
        return {file.layout.name: file.digests for file in self._files}

    def _copy_streams(self) -> CopyStreams:
        return CopyStreams(devices_of(file.layout for file in self._files))

    def _placements(self) -> Iterator[_Placement]:
        """Place every range of this rank in a block, in order. Unless staging, submit each block that is full."""
        batch: _BlockBatch | None = None
        for file in self._files:
            for write_range in file.share.own_ranges:
                if write_range.late:
                    yield self._place_late(file, write_range)
                    continue
                placement = batch.place(file, write_range) if batch is not None else None
                if placement is None:
                    if batch is not None and self._staged is None:
                        self._submit(batch)
                    batch = self._take_batch()
                    if batch is None:
                        return
                    placement = batch.place(file, write_range)
                    assert placement is not None
                yield placement

    def _take_batch(self) -> _BlockBatch | None:
        """Take a block from the pool. Raise if a write has failed; return None if the writer was closed."""
        block = self._pool.take(self._failed.is_set)
        if block is None:
            self._wait()
            return None
        batch = _BlockBatch(block)
        self._batches.append(batch)
        return batch

    def _place_late(self, file: _File, write_range: WriteRange) -> _Placement:
        placement = self._late_batches[-1].place(file, write_range) if self._late_batches else None
        if placement is None:
            # Not a block of the pool: this one is kept until the end, and the others of a ring could wait for it.
            batch = _BlockBatch(Block(pinned=False))
            self._late_batches.append(batch)
            placement = batch.place(file, write_range)
            assert placement is not None
        return placement

    def _seal_staged(self, placement: _Placement) -> None:
        placement.file.seal(placement, placement.range.start, placement.range.stop)
        if not placement.range.late and placement is placement.batch.placements[-1]:
            self._submit(placement.batch)

    def _fill_and_seal(self, placement: _Placement, streams: CopyStreams) -> None:
        write_range, file = placement.range, placement.file
        # Copies in host memory are hashed in strides, while they are in the cache. Copies off a device are waited for
        # once a block; they are in no cache, so the writing threads hash them. Late ranges are not complete yet.
        stride = BLOCK_BYTES if streams else _STRIDE
        digest = BlockHash() if not streams and not write_range.late else None
        for start in range(write_range.start, write_range.stop, stride):
            stop = min(start + stride, write_range.stop)
            file.fill(placement, start, stop)
            streams.wait()
            file.seal(placement, start, stop)
            if digest is not None:
                digest.update(placement.view(start, stop))
        if digest is not None:
            file.digests[write_range.start] = digest.hexdigest()

    def _submit(self, batch: _BlockBatch) -> None:
        """Let a thread write the batch. A block of the pool goes back to it afterwards."""
        if from_pool := batch in self._batches:
            self._batches.remove(batch)
        self._writes.append(self._threads.submit(partial(self._write_batch, batch, from_pool)))

    def _write_batch(self, batch: _BlockBatch, from_pool: bool) -> None:
        try:
            for placements in _contiguous(batch.placements):
                if self._failed.is_set():
                    return
                self._write_contiguous(placements)
        except BaseException:
            self._failed.set()
            raise
        finally:
            if from_pool:
                self._pool.give(batch.block)
            if self._failed.is_set():
                self._pool.wake()

    def _write_contiguous(self, placements: Sequence[_Placement]) -> None:
        for placement in placements:
            write_range, digests = placement.range, placement.file.digests
            if write_range.start not in digests:
                digests[write_range.start] = BlockHash(placement.view(write_range.start, write_range.stop)).hexdigest()
        first = placements[0]
        file, start = first.file.file, first.range.start
        length = placements[-1].range.stop - start
        assert file is not None
        # Direct I/O takes whole pages; the truncate cuts off what is past the end.
        padded = _page_up(length) if file.direct else length
        first.view(start + length, start + padded)[:] = bytes(padded - length)
        self._disk.write(file, first.view(start, start + padded), start)
        if self._progress is not None:
            self._progress(length)

    def _flush(self, file: _File) -> None:
        assert file.file is not None
        if file.share.writes_end:
            self._disk.truncate(file.file, file.layout.size)
        self._disk.flush(file.file)

    def _wait(self) -> None:
        """Wait for all submitted writes; raise the error of the first that failed."""
        writes, self._writes = self._writes, []
        for write in writes:
            write.result()


def _contiguous(placements: Sequence[_Placement]) -> Iterator[list[_Placement]]:
    """Group ranges that are contiguous in the file, as they are in the block: each group is one write."""
    group: list[_Placement] = []
    for placement in placements:
        if group and (group[-1].file is not placement.file or group[-1].range.stop != placement.range.start):
            yield group
            group = []
        group.append(placement)
    if group:
        yield group


def _page_up(size: int) -> int:
    return -(-size // PAGE) * PAGE
