"""Reads files of a checkpoint into memory in one pass, and verifies every block on the way.

A restore first reads the parts that describe the others (headers, directories, pickles) with `CheckpointFile.read`.
Then it adds targets (ranges of the file and where they go), and `Reader.run` streams the blocks of every file once:
read → XXH3 against the manifest → scatter to the targets. Blocks without a target are verified too, unless several
ranks read the file and each needs only a part of it. Neighbouring small blocks are read as one span.
"""

from __future__ import annotations

import os
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from itertools import accumulate, islice
from pathlib import Path
from typing import Protocol

from reprieve.checkpoint.buffers.block_pool import BLOCK_BYTES, RING_BLOCKS, Block, BlockPool
from reprieve.checkpoint.buffers.thread_pool import ThreadPool
from reprieve.checkpoint.format.checksum import BlockHash
from reprieve.checkpoint.format.manifest import FileEntry
from reprieve.errors import InvalidCheckpoint
from reprieve.storage.disk import DAMAGE, PAGE, OpenFile, open_for_reading, read_from_cache, read_into

READERS = 4
_STRIDE = 2**19


class Cache(Enum):
    """How a reader uses the page cache. Bytes from it do not prove that the medium holds the same."""

    AVOID = "read from the medium"
    USE = "read what it holds, and the rest from the medium"
    FILL = "read through it, so that the next reader finds the bytes there"


class Destination(Protocol):
    """Where restored bytes go."""

    asynchronous: bool
    """Whether `put` only starts the copy. Then a whole block is put at once, before it is hashed."""

    def put(self, block: Block, at: int, start: int, stop: int) -> None:
        """Copy bytes [start, stop) of this destination from `at` in the block."""

    def finish(self) -> None:
        """Wait until all copies have arrived and the block may be used again."""


@dataclass(slots=True)
class Target:
    """Bytes [offset, offset + length) of a file, and their destination."""

    offset: int
    length: int
    destination: Destination


@dataclass(frozen=True, slots=True)
class Span:
    """Blocks [first, last) of a file, which are read at once."""

    file: CheckpointFile
    first: int
    last: int

    @property
    def start(self) -> int:
        return self.file.edges[self.first]

    @property
    def length(self) -> int:
        return self.file.edges[self.last] - self.start


class CooperativeRead(Protocol):
    """Ranks that each read a part of the same spans and exchange them."""

    def read(self, spans: Sequence[Span], *, progress: Callable[[int], None] | None) -> None:
        """Load, exchange and deliver the spans, which are the same on every rank."""


class CheckpointFile:
    """A file of a checkpoint, open for reading. A file without an entry (of a foreign checkpoint) is not verified."""

    def __init__(self, reader: Reader, folder: Path, name: str, entry: FileEntry | None) -> None:
        self.name = name
        self.targets: list[Target] = []
        self._reach: list[int] = []
        self.only_targets = False
        """Whether to skip blocks without a target, because other ranks read and verify them."""
        self.shared = False
        """Whether every rank needs the whole file: each reads a part and receives the rest from the others."""
        self._reader = reader
        self._folder = folder
        self._entry = entry
        self._file = open_for_reading(folder / name, buffered=reader.cache is Cache.FILL)
        self._cached = open_for_reading(folder / name, buffered=True) if reader.cache is Cache.USE else None
        self._warm = self._cached is not None
        """Whether the page cache may hold the file: true until a read from the cache fails."""
        self.size = os.fstat(self._file.fd).st_size
        if entry is not None and self.size != entry.bytes:
            self.close()
            raise self.bad(f"has {self.size:,} bytes, the manifest says {entry.bytes:,}")
        self.edges = (entry or FileEntry(self.size, "", ())).edges(reader.block_bytes)
        """Where the blocks start, and where the last block ends."""

    def bad(self, problem: str) -> InvalidCheckpoint:
        """Return the error to raise for a problem with this file."""
        return InvalidCheckpoint(f"{self.name} {problem}", path=self._folder)

    def read(self, start: int, stop: int) -> bytes:
        """Return verified bytes, for the parts that describe the rest of the file."""
        if not 0 <= start <= stop <= self.size:
            raise self.bad(f"points to bytes {start} to {stop}, but ends at {self.size}")
        if self._entry is None:
            with self._file.path.open("rb", buffering=0) as plain:
                return os.pread(plain.fileno(), stop - start, start)
        out = bytearray()
        for index in range(bisect_right(self.edges, start) - 1, bisect_left(self.edges, stop)):
            block, keep = self._reader.metadata_block(self, index)
            base = self.edges[index]
            out += block.view[max(start - base, 0) : min(stop, self.edges[index + 1]) - base]
            if not keep:
                self._reader.pool.give(block)
        return bytes(out)

    def load(self, span: Span, block: Block) -> None:
        """Read a span into a block of memory, without verifying it."""
        start, length = span.start, span.length
        if self._warm and self._cached is not None:
            if read_from_cache(self._cached, block.view[:length], start):
                self._reader.from_medium = False
                return
            self._warm = False
        read_length = -(-length // PAGE) * PAGE if self._file.direct else length
        try:
            done = read_into(self._file, block.view[:read_length], start)
        except OSError as error:
            if error.errno not in DAMAGE:
                raise
            raise self.bad(f"cannot be read at byte {start:,}: {error.strerror}") from error
        if done < length:
            raise self.bad(f"ends at byte {start + done:,} while being read; {self.size:,} expected")

    def deliver(self, span: Span, block: Block, *, verified: bool = False) -> None:
        """Verify the blocks and copy their bytes to the targets, in strides that stay in the CPU's cache."""
        base = span.start
        started: list[Destination] = []
        try:
            self._put(block, base, base, base + span.length, started)
            for index in range(span.first, span.last):
                digest = None if verified or self._entry is None else BlockHash()
                for start in range(self.edges[index], self.edges[index + 1], _STRIDE):
                    stop = min(start + _STRIDE, self.edges[index + 1])
                    if digest is not None:
                        digest.update(block.view[start - base : stop - base])
                    self._put(block, base, start, stop)
                if digest is not None:
                    self.check(index, digest.hexdigest())
        finally:  # also if a block is damaged: its memory is used again, and no device may still read from it
            for destination in started:
                destination.finish()

    def _put(self, block: Block, base: int, start: int, stop: int, started: list[Destination] | None = None) -> None:
        """Copy bytes [start, stop) of the file to the synchronous targets; with `started`, to the asynchronous ones.

        Adds the asynchronous destinations to `started`.
        """
        for target in islice(self.targets, bisect_right(self._reach, start), None):
            if target.offset >= stop:
                return
            first, last = max(start, target.offset), min(stop, target.offset + target.length)
            if first < last and target.destination.asynchronous == (started is not None):
                if started is not None:
                    started.append(target.destination)
                target.destination.put(block, first - base, first - target.offset, last - target.offset)

    def sort_targets(self) -> None:
        """Prepare for the first `deliver`."""
        self.targets.sort(key=lambda target: target.offset)
        # The furthest end of all targets up to each one: targets may overlap, and a long one may precede many short.
        self._reach = list(accumulate((target.offset + target.length for target in self.targets), max))

    def check(self, index: int, digest: str) -> None:
        """Raise InvalidCheckpoint unless the block has this checksum."""
        if self._entry is not None and digest != self._entry.blocks[index]:
            start, end = self.edges[index : index + 2]
            raise self.bad(f"is damaged: block {index} (bytes {start:,} to {end:,}) does not match its checksum")

    def spans(self, without: Collection[int] = ()) -> Iterator[Span]:
        """Yield the blocks to read, as spans of neighbours that fit into a block of memory."""
        first: int | None = None
        last = 0
        for index in self._needed():
            if index in without:
                continue
            if first is not None and (index != last or self.edges[index + 1] - self.edges[first] > BLOCK_BYTES):
                yield Span(self, first, last)
                first = None
            if first is None:
                first = index
            last = index + 1
        if first is not None:
            yield Span(self, first, last)

    def _needed(self) -> list[int] | range:
        if not self.only_targets:
            return range(len(self.edges) - 1)
        return sorted(
            {
                index
                for target in self.targets
                for index in range(
                    bisect_right(self.edges, target.offset) - 1, bisect_left(self.edges, target.offset + target.length)
                )
            }
        )

    def close(self) -> None:
        file, self._file = self._file, OpenFile(self._file.path, -1, False)
        cached, self._cached = self._cached, None
        for open_file in (file, cached):
            if open_file is not None and open_file.fd >= 0:
                os.close(open_file.fd)


class Reader:
    """Reader of the files of one checkpoint, through a pool of blocks."""

    def __init__(
        self, folder: Path, pool: BlockPool, *, block_bytes: int = BLOCK_BYTES, cache: Cache = Cache.AVOID
    ) -> None:
        if block_bytes > BLOCK_BYTES or block_bytes % PAGE:
            raise InvalidCheckpoint(
                f"uses blocks of {block_bytes:,} bytes, which this version cannot read", path=folder
            )
        self.pool = pool
        self.cache = cache
        self.from_medium = cache is not Cache.FILL
        """Whether every byte so far came from the medium, and not from the page cache."""
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
        """Open a file, or return it if it is open already."""
        if name not in self._files:
            try:
                self._files[name] = CheckpointFile(self, self._folder, name, entry)
            except FileNotFoundError as error:
                raise InvalidCheckpoint(f"{name} is missing", path=self._folder) from error
            except OSError as error:
                if error.errno not in DAMAGE:
                    raise
                raise InvalidCheckpoint(f"{name} cannot be opened: {error.strerror}", path=self._folder) from error
        return self._files[name]

    def files(self) -> list[CheckpointFile]:
        """Return all opened files."""
        return list(self._files.values())

    def metadata_block(self, file: CheckpointFile, index: int) -> tuple[Block, bool]:
        """Return a verified block, and whether it is kept so that `run` need not read it again."""
        kept = self._kept.get((file.name, index))
        if kept is not None:
            return kept, True
        block = self.pool.take()
        assert block is not None
        try:
            span = Span(file, index, index + 1)
            file.load(span, block)
            file.check(index, BlockHash(block.view[: span.length]).hexdigest())
        except BaseException:
            self.pool.give(block)
            raise
        # At most half of the blocks: `run` needs some to work with.
        if keep := len(self._kept) < min(RING_BLOCKS, self.pool.limit) // 2:
            self._kept[(file.name, index)] = block
        return block, keep

    def run(
        self,
        *,
        together: CooperativeRead | None = None,
        progress: Callable[[int], None] | None = None,
        select: Callable[[int], bool] = lambda index: True,
    ) -> None:
        """Read every opened file. Raise the first InvalidCheckpoint; the targets' contents are then undefined.

        With `together`, shared files are read together with other ranks. `select`: whether to read the span with this
        index; spans are numbered over all files, as `together` reads them.
        """
        files = sorted(self._files.values(), key=lambda file: (-file.size, file.name))
        for file in files:
            file.sort_targets()
        if together is not None:
            # Shared files first: a rank that finds a damaged block in another file would not come to the collectives.
            shared = [file for file in files if file.shared]
            for file in shared:
                for index in [index for name, index in self._kept if name == file.name]:
                    self.pool.give(self._kept.pop((file.name, index)))
            together.read([span for file in shared for span in file.spans()], progress=progress)
            files = [file for file in files if not file.shared]
        self._run_alone(files, progress, select)

    def _run_alone(
        self,
        files: Sequence[CheckpointFile],
        progress: Callable[[int], None] | None,
        select: Callable[[int], bool],
    ) -> None:
        failed = threading.Event()

        def read_span(span: Span, block: Block | None = None) -> None:
            verified = block is not None
            try:
                if failed.is_set():
                    return
                if block is None:
                    block = self.pool.take()
                    assert block is not None
                    span.file.load(span, block)
                span.file.deliver(span, block, verified=verified)
                if progress is not None:
                    progress(span.length)
            except BaseException:
                failed.set()
                raise
            finally:
                if block is not None:
                    self.pool.give(block)

        # Kept blocks first: that returns them to the pool.
        kept, self._kept = self._kept, {}
        work = [
            partial(read_span, Span(self._files[name], index, index + 1), block)
            for (name, index), block in kept.items()
        ]
        spans = (span for file in files for span in file.spans({index for name, index in kept if name == file.name}))
        work += [partial(read_span, span) for index, span in enumerate(spans) if select(index)]
        threads = ThreadPool(READERS, "reprieve-read")
        try:
            for future in [threads.submit(item) for item in work]:
                future.result()
        finally:
            threads.join()
