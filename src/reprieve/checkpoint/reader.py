"""Files become bytes in memory again, verified block by block while they are read: one pass, nothing trusted unread.

A restore first asks for the parts that say what is where (headers, directories, pickles: `CheckpointFile.read`), then
adds targets (ranges of the file and where they go) and lets `Reader.run` stream every block of every file once:
read → XXH3 against the manifest → scatter to the targets. Blocks without a target are verified all the same.
"""

from __future__ import annotations

import os
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Protocol

from reprieve.checkpoint.blocks import BLOCK_BYTES, RING_BLOCKS, Block, BlockPool
from reprieve.checkpoint.checksum import BlockHash
from reprieve.checkpoint.manifest import FileEntry
from reprieve.checkpoint.workers import Workers
from reprieve.errors import InvalidCheckpoint
from reprieve.storage.disk import PAGE, OpenFile, open_for_reading, read_into

READERS = 4
_STRIDE = 2**19


class Sink(Protocol):
    """Where bytes go."""

    asynchronous: bool
    """`put` only starts the copy: better a whole block at once, before the block is hashed."""

    def put(self, block: Block, at: int, start: int, stop: int) -> None:
        """Take bytes [start, stop) of this sink from `at` in the block."""

    def finish(self) -> None:
        """All that was put has arrived; the block may be used again."""


@dataclass(slots=True)
class Target:
    """Bytes [offset, offset + length) of a file, and where they go."""

    offset: int
    length: int
    sink: Sink


class CheckpointFile:
    """One file of a checkpoint, open for reading. Without an entry (a foreign file) there is nothing to verify."""

    def __init__(self, reader: Reader, folder: Path, name: str, entry: FileEntry | None) -> None:
        self.name = name
        self.targets: list[Target] = []
        self._reader = reader
        self._folder = folder
        self._entry = entry
        self._file = open_for_reading(folder / name)
        self.size = os.fstat(self._file.fd).st_size
        if entry is not None and self.size != entry.bytes:
            self.close()
            raise self.bad(f"has {self.size:,} bytes, the manifest says {entry.bytes:,}")

    def bad(self, what: str) -> InvalidCheckpoint:
        return InvalidCheckpoint(f"{self.name} {what}", path=self._folder)

    @property
    def blocks(self) -> int:
        return -(-self.size // self._reader.block_bytes)

    def read(self, start: int, stop: int) -> bytes:
        """Verified bytes, for the parts that say what is where."""
        if not 0 <= start <= stop <= self.size:
            raise self.bad(f"points to bytes {start} to {stop}, and ends at {self.size}")
        if self._entry is None:
            with self._file.path.open("rb", buffering=0) as plain:
                return os.pread(plain.fileno(), stop - start, start)
        size = self._reader.block_bytes
        out = bytearray()
        for index in range(start // size, -(-stop // size)):
            block, keep = self._reader.metadata_block(self, index)
            base = index * size
            out += block.view[max(start - base, 0) : min(stop - base, size)]
            if not keep:
                self._reader.pool.give(block)
        return bytes(out)

    def load(self, index: int, block: Block) -> int:
        """One block from the disk; its length. Not verified yet."""
        start = index * self._reader.block_bytes
        length = min(self._reader.block_bytes, self.size - start)
        wanted = -(-length // PAGE) * PAGE if self._file.direct else length
        try:
            done = read_into(self._file, block.view[:wanted], start)
        except OSError as error:
            raise self.bad(f"cannot be read at byte {start:,}: {error.strerror}") from error
        if done < length:
            raise self.bad(f"ends at byte {start + done:,} while being read; {self.size:,} expected")
        return length

    def deliver(self, index: int, block: Block, length: int, *, verified: bool) -> None:
        """Check the block and hand its bytes to the targets, a stride at a time while it is in the cache."""
        base = index * self._reader.block_bytes
        digest = None if verified or self._entry is None else BlockHash()
        started = [target.sink for target in self._put(block, base, base, base + length, asynchronous=True)]
        for start in range(base, base + length, _STRIDE):
            stop = min(start + _STRIDE, base + length)
            if digest is not None:
                digest.update(block.view[start - base : stop - base])
            for _ in self._put(block, base, start, stop, asynchronous=False):
                pass
        for sink in started:
            sink.finish()
        if digest is not None:
            self.check(index, digest.hexdigest())

    def _put(self, block: Block, base: int, start: int, stop: int, *, asynchronous: bool) -> Iterator[Target]:
        """Hand bytes [start, stop) of the file to the targets of one kind; those that took some."""
        at = max(0, bisect_right(self.targets, start, key=lambda target: target.offset) - 1)
        for target in islice(self.targets, at, None):
            if target.offset >= stop:
                return
            first, last = max(start, target.offset), min(stop, target.offset + target.length)
            if first < last and target.sink.asynchronous == asynchronous:
                target.sink.put(block, first - base, first - target.offset, last - target.offset)
                yield target

    def check(self, index: int, digest: str) -> None:
        if self._entry is not None and digest != self._entry.blocks[index]:
            start = index * self._reader.block_bytes
            end = min(start + self._reader.block_bytes, self.size)
            raise self.bad(f"is damaged: block {index} (bytes {start:,} to {end:,}) does not match its checksum")

    def close(self) -> None:
        file, self._file = self._file, OpenFile(self._file.path, -1, False)
        if file.fd >= 0:
            os.close(file.fd)


class Reader:
    """Reads the files of one checkpoint through a pool of blocks."""

    def __init__(self, folder: Path, pool: BlockPool, *, block_bytes: int = BLOCK_BYTES) -> None:
        if block_bytes > BLOCK_BYTES or block_bytes % PAGE:
            raise InvalidCheckpoint(
                f"uses blocks of {block_bytes:,} bytes, which this version cannot read", path=folder
            )
        self.pool = pool
        self.block_bytes = block_bytes
        self._folder = folder
        self._files: dict[str, CheckpointFile] = {}
        self._kept: dict[tuple[str, int], Block] = {}

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *exc: object) -> None:
        for block in self._kept.values():
            self.pool.give(block)
        self._kept.clear()
        for file in self._files.values():
            file.close()

    def open(self, name: str, entry: FileEntry | None) -> CheckpointFile:
        if name not in self._files:
            try:
                self._files[name] = CheckpointFile(self, self._folder, name, entry)
            except FileNotFoundError as error:
                raise InvalidCheckpoint(f"{name} is missing", path=self._folder) from error
            except OSError as error:
                raise InvalidCheckpoint(f"{name} cannot be opened: {error.strerror}", path=self._folder) from error
        return self._files[name]

    def metadata_block(self, file: CheckpointFile, index: int) -> tuple[Block, bool]:
        """A verified block, and whether it is kept for `run`, which then need not read it again."""
        kept = self._kept.get((file.name, index))
        if kept is not None:
            return kept, True
        block = self.pool.take()
        assert block is not None
        try:
            length = file.load(index, block)
            file.check(index, BlockHash(block.view[:length]).hexdigest())
        except BaseException:
            self.pool.give(block)
            raise
        # Never so many that `run` would have none to work with.
        if keep := len(self._kept) < RING_BLOCKS // 2:
            self._kept[(file.name, index)] = block
        return block, keep

    def run(self, *, progress: Callable[[int], None] | None = None) -> None:
        """Read every block of every opened file. Raises the first InvalidCheckpoint; targets may then hold anything."""
        failed = threading.Event()

        def one(work: tuple[CheckpointFile, int]) -> None:
            file, index = work
            if failed.is_set():
                return
            block = self._kept.pop((file.name, index), None)
            verified = block is not None
            try:
                block = block or self.pool.take()
                assert block is not None
                if verified:
                    length = min(self.block_bytes, file.size - index * self.block_bytes)
                else:
                    length = file.load(index, block)
                file.deliver(index, block, length, verified=verified)
                if progress is not None:
                    progress(length)
            except BaseException:
                failed.set()
                raise
            finally:
                if block is not None:
                    self.pool.give(block)

        for file in self._files.values():
            file.targets.sort(key=lambda target: target.offset)
        # Kept blocks first: that frees them for the others.
        work = sorted(self._work(), key=lambda item: (item[0].name, item[1]) not in self._kept)
        threads = Workers(READERS, "reprieve-read")
        try:
            for done in [threads.submit(partial(one, item)) for item in work]:
                done.result()
        finally:
            threads.join()

    def _work(self) -> Iterable[tuple[CheckpointFile, int]]:
        for file in sorted(self._files.values(), key=lambda file: -file.size):
            for index in range(file.blocks):
                yield file, index
