"""The memory that bytes pass through on their way between tensors and storage.

A block is page-aligned host memory of one fixed size, pinned where there is a GPU. A pool hands blocks out and
takes them back. A blocking save and a restore pass through a few blocks (a ring); a background save takes as many as
the state needs, so that filling never waits for the disk. Both are the same pool with another limit.

Blocks are made once and kept: touching fresh memory runs at 2 GB/s and pinning it at 1 to 3, a rewrite at 11.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import weakref
from collections.abc import Callable

BLOCK_BYTES = 16 * 2**20
"""The unit of I/O and of checksums. Disks reach their limit with 4 to 16 MiB; a checksum every 16 MiB costs 2 bytes
a megabyte in the manifest."""

RING_BLOCKS = 8
"""128 MiB: enough to keep four writers busy while the next blocks fill, and half of what a save may take."""


class Block:
    """`BLOCK_BYTES` of page-aligned host memory."""

    __slots__ = ("__weakref__", "_memory", "address", "pinned", "view")

    def __init__(self, *, pinned: bool, touch: bool = False) -> None:
        self._memory = mmap.mmap(-1, BLOCK_BYTES)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        self.view = memoryview(self._memory)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        if touch:  # the kernel gives memory at its first use: before it is needed, or while somebody waits
            ctypes.memset(self.address, 0, BLOCK_BYTES)
        self.pinned = pinned and _pin(self.address)
        if self.pinned:
            # Before the memory goes back: the driver would refuse a later mapping that lands on the same address.
            weakref.finalize(self, _unpin, self.address, self._memory, os.getpid()).atexit = False


class BlockPool:
    """Hands out blocks up to a limit. All methods may be called from any thread."""

    def __init__(self, *, limit: int = RING_BLOCKS, pinned: bool = False) -> None:
        self.limit = limit
        self.pinned = pinned
        self._free: list[Block] = []
        self._made = 0
        self._changed = threading.Condition()

    @property
    def ready(self) -> int:
        """Blocks that could be taken now without making one or waiting for one."""
        with self._changed:
            return len(self._free)

    @property
    def made(self) -> int:
        """Blocks that exist, taken or not."""
        with self._changed:
            return self._made

    def take(self, stop: Callable[[], bool] = lambda: False) -> Block | None:
        """A block; made if the limit allows, else waited for. None when `stop` turned true while waiting."""
        with self._changed:
            while True:
                if self._free:
                    return self._free.pop()
                if stop():
                    return None
                if self._made < self.limit:
                    self._made += 1
                    break
                self._changed.wait()
        try:
            return Block(pinned=self.pinned)
        except BaseException:
            with self._changed:
                self._made -= 1
            raise

    def give(self, block: Block) -> None:
        with self._changed:
            self._free.append(block)
            self._changed.notify()

    def empty(self) -> None:
        """Let go of the memory of all blocks that are not taken. The next one that is asked for is made anew."""
        with self._changed:
            self._made -= len(self._free)
            self._free.clear()

    def wake(self) -> None:
        """Make every waiting `take` look at its `stop` again."""
        with self._changed:
            self._changed.notify_all()

    def grow(self, limit: int, stop: Callable[[], bool] = lambda: False) -> None:
        """Make blocks until there are `limit`, one at a time; meant for a thread of its own."""
        self.limit = max(self.limit, limit)
        while not stop():
            with self._changed:
                if self._made >= self.limit:
                    return
                self._made += 1
            try:
                block = Block(pinned=self.pinned, touch=True)
            except BaseException:
                with self._changed:
                    self._made -= 1
                raise
            self.give(block)


def _pin(address: int) -> bool:
    """Register the memory with CUDA, so that copies from the device run at the bus's speed, asynchronously."""
    import torch

    return int(torch.cuda.cudart().cudaHostRegister(address, BLOCK_BYTES, 0)) == 0


def _unpin(address: int, _memory: mmap.mmap, pid: int) -> None:
    import torch

    if os.getpid() == pid:  # not in a forked child, which has the memory but not the driver
        torch.cuda.cudart().cudaHostUnregister(address)
