"""Host memory for the staging copies of background saves.

A background save needs as many blocks as the state is large. A thread allocates them ahead of the first such save, if
the machine has the memory. Until they are ready, and if they never are, background saves run as blocking ones.
"""

from __future__ import annotations

import logging
import threading

from reprieve.checkpoint.buffers.available_memory import available_bytes
from reprieve.checkpoint.buffers.block_pool import BLOCK_BYTES, BlockPool
from reprieve.units import format_size

log = logging.getLogger("reprieve")

_MEMORY_MARGIN = 0.1
"""Fraction of the available memory that staging leaves to other uses."""


class StagingBuffers:
    """The blocks of a pool for whole copies of the state, allocated in the background."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._warned = False

    def has_room(self, blocks: int) -> bool:
        """Return whether so many blocks are ready. If not, start allocating them for the next save."""
        if self._pool.ready >= blocks:
            return True
        if self.prepare(blocks):
            log.info("staging memory for background saves is not ready yet: this save blocks until it is written")
        return False

    def prepare(self, blocks: int, *, wait: bool = False) -> bool:
        """Start allocating so many blocks. Return False, with one warning, if there is no memory for them."""
        missing_bytes = (blocks - self._pool.made) * BLOCK_BYTES
        if missing_bytes > 0 and (self._thread is None or not self._thread.is_alive()):
            free_bytes = int(available_bytes() * (1 - _MEMORY_MARGIN))
            if missing_bytes > free_bytes:
                if not self._warned:
                    log.warning(
                        "no memory for a staging copy of %s (%s free): background saves block until they are written",
                        format_size(blocks * BLOCK_BYTES),
                        format_size(free_bytes),
                    )
                    self._warned = True
                return False
            # A daemon: unless joined, it must not keep the interpreter alive.
            self._thread = threading.Thread(
                target=self._pool.grow, args=(blocks, self._stop.is_set), name="reprieve-memory", daemon=True
            )
            self._thread.start()
        if wait and self._thread is not None:
            self._thread.join()
        return True

    def close(self) -> None:
        """Stop allocating."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
