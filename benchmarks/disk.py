"""The disk's own limit: the same bytes by direct I/O from memory that is already allocated, the best of several ways.

Nothing else is done with the bytes, so no checkpoint can be faster. The file is new and its space is reserved before
the clock starts; the flush at the end counts.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

from benchmarks.measure import Job
from reprieve.checkpoint.buffers.block_pool import BLOCK_BYTES, RING_BLOCKS

PAGE = 4096
_MIB = 2**20


class Way(NamedTuple):
    """How the bytes are moved."""

    threads: int
    block_bytes: int

    def __str__(self) -> str:
        return f"{self.threads} thread{'s' * (self.threads > 1)} × {self.block_bytes // _MIB} MiB"


WAYS = [Way(threads, mib * _MIB) for threads in (1, 2, 4) for mib in (4, 16)]


@cache
def _ring() -> memoryview:
    """As much memory as a save passes through, of the same kind: the memory that a write comes from changes its speed
    by a third on some virtual machines. The bytes are random, because a disk (or its host) may optimise zeros."""
    memory = mmap.mmap(-1, RING_BLOCKS * BLOCK_BYTES)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    memory[:] = os.urandom(len(memory))
    return memoryview(memory)


def create(path: Path, size: int) -> None:
    """A new file with its space reserved."""
    with path.open("xb") as file:
        os.posix_fallocate(file.fileno(), 0, _whole_pages(size))


def write(path: Path, size: int, way: Way) -> None:
    """Durable on return."""
    _each_block(path, os.O_WRONLY, size, way, os.pwrite, flush=True)


def read(path: Path, size: int, way: Way) -> None:
    _each_block(path, os.O_RDONLY, size, way, lambda fd, memory, at: os.preadv(fd, [memory], at), flush=False)


def _each_block(
    path: Path, flags: int, size: int, way: Way, move: Callable[[int, memoryview, int], int], *, flush: bool
) -> None:
    size = _whole_pages(size)
    fd = os.open(path, flags | os.O_DIRECT)

    def every_nth(first: int) -> None:
        for at in range(first * way.block_bytes, size, way.threads * way.block_bytes):
            count = min(way.block_bytes, size - at)
            start = at % len(_ring())
            if move(fd, _ring()[start : start + count], at) != count:
                raise OSError(f"{path}: a short transfer at byte {at}")

    try:
        with ThreadPoolExecutor(way.threads) as threads:
            list(threads.map(every_nth, range(way.threads)))
        if flush:
            os.fsync(fd)
    finally:
        os.close(fd)


def touch_memory() -> None:
    """Runs before the clock starts."""
    _ring()


def jobs(folder: Path, size: int) -> list[Job]:
    touch_memory()
    written, kept = folder / "disk-write", folder / "disk-read"

    def make_kept() -> None:
        if not kept.exists():
            create(kept, size)
            write(kept, size, WAYS[-1])

    found = []
    for way in WAYS:
        label = f"{way.threads}x{way.block_bytes // _MIB}mib"
        found.append(
            Job(
                f"disk.write.{label}",
                partial(write, written, size, way),
                before=partial(create, written, size),
                after=written.unlink,
                bytes=size,
                label=str(way),
            )
        )
        found.append(
            Job(f"disk.read.{label}", partial(read, kept, size, way), before=make_kept, bytes=size, label=str(way))
        )
    return found


def _whole_pages(size: int) -> int:
    return -(-size // PAGE) * PAGE
