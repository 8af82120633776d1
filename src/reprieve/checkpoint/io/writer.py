"""Layouts become files: bytes into blocks, checksums on the way, blocks to the disk, everything flushed.

    fill     source → block          the only part that touches the training state
    seal     bytes from other ranks, CRCs, deferred bytes, XXH3
    write    block → disk            a few threads; the interpreter lock is released in all three

A blocking save fills and seals half a megabyte at a time, while it is in the cache, and passes through a ring of
blocks. A background save fills all blocks first (that is the pause that training sees) and seals and writes later.

A rank among several writes its pieces of each file (`division.py`). Late pieces wait in memory for the CRCs of the
others: `write` gives what this rank knows of them, `complete` takes what all ranks know.
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
from reprieve.checkpoint.io.partition import FileShare, WriteRange, whole
from reprieve.storage.disk import PAGE, Disk, OpenFile

WRITERS = 4
"""Threads that wait in `pwrite`. One is enough for some disks, four for all that were measured."""

_STRIDE = 2**19
"""Bytes that are copied and then hashed while still in the second-level cache: 4.4 GB/s against 2.6 by whole blocks."""

Crcs = dict[int, list[tuple[int, int, int]]]
"""By number: stretches of a record as (offset in the file, length, CRC-32)."""

Received = Mapping[str, Sequence[tuple[int, bytes]]]
"""By file: bytes that other ranks gave, and where they go, in order."""


@dataclass(slots=True, eq=False)
class _BlockBatch:
    """A block and the pieces in it, on their way to the disk."""

    block: Block
    slots: list[_Placement] = field(default_factory=list)
    used: int = 0

    def place(self, file: _File, piece: WriteRange) -> _Placement | None:
        """A place for the piece at the next page; None if it does not fit."""
        if self.used + piece.stop - piece.start > BLOCK_BYTES:
            return None
        slot = _Placement(file, piece, self, self.used)
        self.slots.append(slot)
        self.used = -(-(self.used + piece.stop - piece.start) // PAGE) * PAGE
        return slot


@dataclass(slots=True, eq=False)
class _Placement:
    """Where a piece of a file is in a block."""

    file: _File
    piece: WriteRange
    load: _BlockBatch
    at: int


class _File:
    """One file on its way to the disk."""

    def __init__(self, part: FileShare) -> None:
        self.part = part
        self.layout = part.layout
        self.file: OpenFile | None = None
        self.digests: dict[int, str] = {}
        """By the start of the piece."""
        self.stretches: Crcs = {}
        """What this rank knows of each CRC, in a file that several write."""
        self.received: Sequence[tuple[int, bytes]] = ()
        self._alone = part.alone
        self._crcs = [0] * self.layout.crcs
        self._offsets = [segment.offset for segment in self.layout.segments]
        self._rendered: tuple[int, bytes] = (-1, b"")

    def fill(self, slot: _Placement, start: int, stop: int) -> None:
        """Bytes [start, stop) of the file, as far as this rank has them in its memory."""
        rank, shift = self.part.rank, slot.at - slot.piece.start
        for segment, first, last in self._overlapping(start, stop):
            if isinstance(segment, Segment) and (segment.holders is None or rank in segment.holders):
                assert segment.source is not None
                segment.source.copy(slot.load.block, segment.offset + first + shift, first, last)

    def seal(self, slot: _Placement, start: int, stop: int, digest: BlockHash | None) -> None:
        """The rest of these bytes, and their checksums. Called in the order of the file."""
        view, shift = slot.load.block.view, slot.at - slot.piece.start
        for segment, first, last in self._overlapping(start, stop):
            at = segment.offset + first
            if isinstance(segment, Deferred):
                if not slot.piece.late:
                    view[at + shift : at + shift + last - first] = self._render(segment)[first:last]
                continue
            if segment.holders is not None and not segment.held_by(self.part.rank):
                self._put_received(view, shift, at, segment.offset + last)
            if segment.crc >= 0:
                self._add_to_crc(segment.crc, at, view[at + shift : at + shift + last - first])
        if digest is not None:
            digest.update(view[start + shift : stop + shift])

    def seal_late(self, slot: _Placement) -> None:
        view, shift = slot.load.block.view, slot.at - slot.piece.start
        for segment, first, last in self._overlapping(slot.piece.start, slot.piece.stop):
            if isinstance(segment, Deferred):
                at = segment.offset + first + shift
                view[at : at + last - first] = self._render(segment)[first:last]

    def learn(self, stretches: Crcs) -> None:
        """What all ranks know of the CRCs."""
        for number, known in stretches.items():
            self._crcs[number] = combined_crc(known)

    def _overlapping(self, start: int, stop: int) -> Iterator[tuple[Segment | Deferred, int, int]]:
        """Segments that overlap [start, stop), each with the range of its own bytes that does."""
        number = max(0, bisect_right(self._offsets, start) - 1)
        while number < len(self._offsets) and (segment := self.layout.segments[number]).offset < stop:
            first, last = max(0, start - segment.offset), min(stop - segment.offset, segment.length)
            if first < last:
                yield segment, first, last
            number += 1

    def _put_received(self, view: memoryview, shift: int, start: int, stop: int) -> None:
        number = max(0, bisect_right(self.received, start, key=lambda given: given[0]) - 1)
        while number < len(self.received) and (given := self.received[number])[0] < stop:
            first, last = max(start, given[0]), min(stop, given[0] + len(given[1]))
            if first < last:
                assert first == start, f"{self.layout.name}: nobody gave bytes {start} to {first}"
                view[first + shift : last + shift] = given[1][first - given[0] : last - given[0]]
                start = last
            number += 1
        assert start == stop, f"{self.layout.name}: nobody gave bytes {start} to {stop}"

    def _add_to_crc(self, number: int, at: int, data: memoryview) -> None:
        if self._alone:
            self._crcs[number] = crc32(data, self._crcs[number])
            return
        known = self.stretches.setdefault(number, [])
        offset, length, crc = known.pop() if known and known[-1][0] + known[-1][1] == at else (at, 0, 0)
        # The whole record's, unless others write parts of it: then what follows from it is late, and waits for `learn`.
        self._crcs[number] = crc32(data, crc)
        known.append((offset, length + len(data), self._crcs[number]))

    def _render(self, segment: Deferred) -> bytes:
        if self._rendered[0] != segment.offset:
            self._rendered = (segment.offset, segment.render(self._crcs))
        return self._rendered[1]


class Writer:
    """Writes the files of one save into a folder.

    `stage()` is for the thread that owns the training state; what follows it may be called from another one.
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
        self._files = [_File(file if isinstance(file, FileShare) else whole(file)) for file in files]
        self._progress = progress
        self._failed = threading.Event()
        self._threads = ThreadPool(WRITERS, "reprieve-write")
        self._writes: list[Future[None]] = []
        self._staged: list[_Placement] | None = None
        self._loads: list[_BlockBatch] = []
        """Those with a block of the pool that is not on its way to the disk yet."""
        self._late: list[_BlockBatch] = []

    # One rank alone

    def write_through(self) -> dict[str, FileEntry]:
        """Everything, through a ring of blocks; durable on return."""
        with self:
            self.create()
            self.write()
            return self._entries(self.complete({}))

    def finish(self) -> dict[str, FileEntry]:
        """Write what was staged; durable on return."""
        return self.write_through()

    def _entries(self, digests: Mapping[str, Mapping[int, str]]) -> dict[str, FileEntry]:
        return {
            file.layout.name: FileEntry.of(
                file.layout.size, [digest for _, digest in sorted(digests[file.layout.name].items())]
            )
            for file in self._files
        }

    # One among several

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Give memory and files back. Again does nothing."""
        self._failed.set()  # whatever is still queued must not write to a closed file
        self._threads.join()
        for load in self._loads:
            self._pool.give(load.block)
        self._loads.clear()
        self._late.clear()
        for file in self._files:
            done, file.file = file.file, None
            if done is not None:
                self._disk.close(done)

    def create(self) -> None:
        """Make the files that this rank makes. A full disk is met here, before the first byte."""
        # All of them first: reserving room takes 20 times as long beside running writes.
        for file in self._files:
            if file.part.creates and file.file is None:
                file.file = self._disk.create(self._folder / file.layout.name, file.layout.size)

    def stage(self) -> None:
        """Copy the state into blocks. When this returns training may change it."""
        try:
            self._staged = []
            with CopyStreams(devices_of(file.layout for file in self._files)) as streams:
                for slot in self._slots():
                    slot.file.fill(slot, slot.piece.start, slot.piece.stop)
                    self._staged.append(slot)
                streams.wait()
        except BaseException:
            self.close()
            raise

    def write(self, received: Received | None = None) -> dict[str, Crcs]:
        """Write every piece that is not late; what this rank knows of the CRCs, for the others."""
        for file in self._files:
            file.received = (received or {}).get(file.layout.name, ())
            if file.file is None and file.part.mine:
                file.file = self._disk.open(self._folder / file.layout.name)
        if self._staged is not None:
            for slot in self._staged:
                self._seal(slot, _STRIDE, fill=False)
            self._staged = None
        else:
            with CopyStreams(devices_of(file.layout for file in self._files)) as streams:
                # Copies off a device are waited for once a block; copies in host memory are hashed while cached.
                step = BLOCK_BYTES if streams else _STRIDE
                for slot in self._slots():
                    self._seal(slot, step, fill=True, wait=streams.wait)
        for load in list(self._loads):
            self._write_soon(load)
        self._wait()
        # Those of whole records, too: whoever writes the directory repeats them all.
        return {file.layout.name: file.stretches for file in self._files if file.stretches}

    def complete(self, crcs: Mapping[str, Crcs]) -> dict[str, dict[int, str]]:
        """Write what had to wait, and flush: durable on return. The digest of each piece of each file."""
        for file in self._files:
            file.learn(crcs.get(file.layout.name, {}))
        for load in self._late:
            for slot in load.slots:
                slot.file.seal_late(slot)
            # They lie apart, a page each: a disk takes several of those in the time of one.
            each = -(-len(load.slots) // WRITERS)
            for first in range(0, len(load.slots), each):
                self._write_soon(_BlockBatch(load.block, load.slots[first : first + each]))
        self._wait()
        # The flushes of all files go out together: the journal commits once for most of them.
        for flush in [self._threads.submit(partial(self._flush, file)) for file in self._files if file.file]:
            flush.result()
        return {file.layout.name: file.digests for file in self._files}

    # Inside

    def _slots(self) -> Iterator[_Placement]:
        """Every piece of ours, in order, each with its place in a block; a block that is full is left behind."""
        load: _BlockBatch | None = None
        for file in self._files:
            for piece in file.part.mine:
                if piece.late:
                    slot = self._late[-1].place(file, piece) if self._late else None
                    if slot is None:  # not from the pool: the others of a ring could not go on without it
                        self._late.append(_BlockBatch(Block(pinned=False)))
                        slot = self._late[-1].place(file, piece)
                else:
                    slot = load.place(file, piece) if load is not None else None
                    if slot is None:
                        if load is not None and self._staged is None:
                            self._write_soon(load)
                        block = self._pool.take(self._failed.is_set)
                        if block is None:
                            self._wait()
                            return
                        load = _BlockBatch(block)
                        self._loads.append(load)
                        slot = load.place(file, piece)
                assert slot is not None
                yield slot

    def _seal(self, slot: _Placement, step: int, *, fill: bool, wait: Callable[[], None] = lambda: None) -> None:
        # In strides while the bytes are in the cache; bytes that are not in it anyway are left to the writing threads.
        digest = BlockHash() if step == _STRIDE and fill and not slot.piece.late else None
        for start in range(slot.piece.start, slot.piece.stop, step):
            stop = min(start + step, slot.piece.stop)
            if fill:
                slot.file.fill(slot, start, stop)
                wait()
            slot.file.seal(slot, start, stop, digest)
        if digest is not None:
            slot.file.digests[slot.piece.start] = digest.hexdigest()
        if not fill and not slot.piece.late and slot is slot.load.slots[-1]:
            self._write_soon(slot.load)

    def _write_soon(self, load: _BlockBatch) -> None:
        if pooled := load in self._loads:
            self._loads.remove(load)
        self._writes.append(self._threads.submit(partial(self._write, load, pooled)))

    def _write(self, load: _BlockBatch, pooled: bool) -> None:
        try:
            for slots in _neighbours(load.slots):
                if self._failed.is_set():
                    return
                self._write_at_once(slots)
        except BaseException:
            self._failed.set()
            raise
        finally:
            if pooled:
                self._pool.give(load.block)
            if self._failed.is_set():
                self._pool.wake()

    def _write_at_once(self, slots: Sequence[_Placement]) -> None:
        view, start, at = slots[0].load.block.view, slots[0].piece.start, slots[0].at
        for slot in slots:
            if slot.piece.start not in slot.file.digests:
                digest = BlockHash(view[slot.at : slot.at + slot.piece.stop - slot.piece.start])
                slot.file.digests[slot.piece.start] = digest.hexdigest()
        file, length = slots[0].file.file, slots[-1].piece.stop - start
        assert file is not None
        # Direct I/O takes whole pages; what is past the end is cut off by the truncate.
        padded = -(-length // PAGE) * PAGE if file.direct else length
        view[at + length : at + padded] = bytes(padded - length)
        self._disk.write(file, view[at : at + padded], start)
        if self._progress is not None:
            self._progress(length)

    def _flush(self, file: _File) -> None:
        assert file.file is not None
        if file.part.ends:
            self._disk.truncate(file.file, file.layout.size)
        self._disk.flush(file.file)

    def _wait(self) -> None:
        writes, self._writes = self._writes, []
        for write in writes:
            write.result()


def _neighbours(slots: Sequence[_Placement]) -> Iterator[list[_Placement]]:
    """Pieces that lie one after the other in the file, as they do in the block: one write for all of them."""
    found: list[_Placement] = []
    for slot in slots:
        if found and (found[-1].file is not slot.file or found[-1].piece.stop != slot.piece.start):
            yield found
            found = []
        found.append(slot)
    if found:
        yield found
