"""Host memory for the staging copies of background saves, made once and ahead of its use."""

from __future__ import annotations

import logging
import threading

from reprieve.checkpoint.buffers.available_memory import available_bytes
from reprieve.checkpoint.buffers.block_pool import BLOCK_BYTES, BlockPool
from reprieve.units import format_size

log = logging.getLogger("reprieve")

_MEMORY_MARGIN = 0.1
"""Part of the free memory that staging leaves to others."""


class StagingBuffers:
    """Memory for whole copies of the state: made once, block by block, on a thread of its own."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._growing: threading.Thread | None = None
        self._stop = threading.Event()
        self._told = False

    def has_room(self, blocks: int) -> bool:
        """Whether so many blocks are ready. If not, start making them for the next save, if memory allows."""
        if self._pool.ready >= blocks:
            return True
        if self.prepare(blocks):
            log.info("memory for background saves is not ready yet: this save blocks until it is written")
        return False

    def prepare(self, blocks: int, *, wait: bool = False) -> bool:
        """Start making so many. False if there is no memory for them, which is said once."""
        more = (blocks - self._pool.made) * BLOCK_BYTES
        if more > 0 and (self._growing is None or not self._growing.is_alive()):
            room = int(available_bytes() * (1 - _MEMORY_MARGIN))
            if more > room:
                if not self._told:
                    log.warning(
                        "no memory for a staging copy of %s (%s free): background saves block until they are written",
                        format_size(blocks * BLOCK_BYTES),
                        format_size(room),
                    )
                    self._told = True
                return False
            # One that is not waited for must not keep the interpreter alive at its end.
            self._growing = threading.Thread(
                target=self._pool.grow, args=(blocks, self._stop.is_set), name="reprieve-memory", daemon=True
            )
            self._growing.start()
        if wait and self._growing is not None:
            self._growing.join()
        return True

    def close(self) -> None:
        self._stop.set()
        if self._growing is not None:
            self._growing.join()
