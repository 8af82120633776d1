"""Blocks of host memory that bytes pass through between tensors and storage, and the pool that lends them.

A block is page-aligned memory of one fixed size, pinned where there is a GPU. A blocking save and a restore pass
through a few blocks (a ring). A background save takes as many as the state needs, so that filling never waits for the
disk. Both use the same pool, with different limits.

Blocks are allocated once and kept: touching fresh memory runs at 2 GB/s, pinning it at 1 to 3, rewriting it at 11.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import weakref
from collections.abc import Callable

BLOCK_BYTES = 16 * 2**20
"""The unit of I/O and of checksums. Disks reach full speed with 4 to 16 MiB; a checksum every 16 MiB takes 2 bytes per
megabyte in the manifest."""

RING_BLOCKS = 8
"""128 MiB: enough to keep four writers busy while the next blocks are filled, and half of what a save may use."""


class Block:
    """`BLOCK_BYTES` of page-aligned host memory."""

    __slots__ = ("__weakref__", "_memory", "address", "pinned", "view")

    def __init__(self, *, pinned: bool, touch: bool = False) -> None:
        self._memory = mmap.mmap(-1, BLOCK_BYTES)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        self.view = memoryview(self._memory)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        if touch:  # the kernel allocates memory at its first use: better now than while a save waits for it
            ctypes.memset(self.address, 0, BLOCK_BYTES)
        self.pinned = pinned and _pin(self.address)
        if self.pinned:
            # Unpin before the memory is freed: the driver would refuse a later mapping at the same address.
            weakref.finalize(self, _unpin, self.address, self._memory, os.getpid()).atexit = False


class BlockPool:
    """A pool that lends blocks up to a limit. All methods may be called from any thread."""

    def __init__(self, *, limit: int = RING_BLOCKS, pinned: bool = False) -> None:
        self.limit = limit
        self.pinned = pinned
        self._free: list[Block] = []
        self._made = 0
        self._changed = threading.Condition()

    @property
    def ready(self) -> int:
        """Blocks that can be taken at once, without allocating or waiting."""
        with self._changed:
            return len(self._free)

    @property
    def made(self) -> int:
        """Blocks that are allocated, taken or not."""
        with self._changed:
            return self._made

    def take(self, stop: Callable[[], bool] = lambda: False) -> Block | None:
        """Take a block: a free one, or a new one if the limit allows; otherwise wait for one.

        Return None if `stop()` becomes true while waiting.
        """
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
        """Return a block to the pool."""
        with self._changed:
            self._free.append(block)
            self._changed.notify()

    def empty(self) -> None:
        """Free the memory of all blocks that are not taken."""
        with self._changed:
            self._made -= len(self._free)
            self._free.clear()

    def wake(self) -> None:
        """Make every waiting `take` call its `stop` again."""
        with self._changed:
            self._changed.notify_all()

    def grow(self, blocks: int, stop: Callable[[], bool] = lambda: False) -> None:
        """Allocate until there are so many blocks; raise the limit if it is lower. Takes seconds: run it on a thread.

        Not up to the limit: a small state would touch memory that no save uses.
        """
        self.limit = max(self.limit, blocks)
        while not stop():
            with self._changed:
                if self._made >= blocks:
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
    """Register the memory with CUDA, so that copies off the device are asynchronous and as fast as the bus."""
    import torch

    return int(torch.cuda.cudart().cudaHostRegister(address, BLOCK_BYTES, 0)) == 0


def _unpin(address: int, _memory: mmap.mmap, pid: int) -> None:
    import torch

    if os.getpid() == pid:  # a forked child has the memory, but not the driver
        torch.cuda.cudart().cudaHostUnregister(address)
