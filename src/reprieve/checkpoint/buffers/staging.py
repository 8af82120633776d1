"""Is there room: on the disk before a save, in memory before a staging copy. Asked early, answered with numbers."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from pathlib import Path

from reprieve.checkpoint.buffers.available_memory import available_bytes
from reprieve.checkpoint.buffers.block_pool import BLOCK_BYTES, BlockPool
from reprieve.checkpoint.folder.catalog import CheckpointInfo
from reprieve.checkpoint.folder.retention import Retention
from reprieve.checkpoint.save.plan import Plan
from reprieve.errors import StorageFull
from reprieve.storage.disk import PAGE, free_bytes, free_files
from reprieve.units import format_size

log = logging.getLogger("reprieve")

_MEMORY_MARGIN = 0.1
"""Part of the free memory that staging leaves to others."""


_SPARE_FILES = 64
"""A save makes a dozen files and folders, or a few for each rank; a start must find room for its owner record."""


def check_room(root: Path, needed: int, going: int = 0) -> None:
    """Raise StorageFull unless one more checkpoint fits, once so many bytes of older ones have gone."""
    free = free_bytes(root) + going
    if needed > free:
        raise StorageFull(
            28,
            f"no room for a checkpoint in {root}: {format_size(needed)} needed, {format_size(free)} free. "
            "Free some space or lower `keep`",
        )
    if not going and free_files(root) < _SPARE_FILES:
        raise StorageFull(
            28,
            f"no room for the files of a checkpoint in {root}: {free_files(root):.0f} inodes free. Remove some files",
        )


def warn_if_tight(root: Path, needed: int, retention: Retention, found: Sequence[CheckpointInfo]) -> bool:
    """Say so if `keep` + 1 checkpoints do not fit; was there something to say?"""
    if retention.keep is None:
        return False
    valid = [one for one in found if one.problem is None]
    # The optimizer has no state before its first step: the newest checkpoint knows the size better.
    size = max([needed, *(one.bytes for one in valid[:1])])
    missing = (retention.keep + 1 - min(len(valid), retention.keep)) * size - free_bytes(root)
    if missing > 0:
        log.warning(
            "%s has room for fewer than keep + 1 = %d checkpoints of %s: %s more will be needed. "
            "Free some space or lower `keep`",
            root,
            retention.keep + 1,
            format_size(size),
            format_size(missing),
        )
    return missing > 0


def bytes_on_disk(plan: Plan, *, alone: bool = True) -> int:
    """Sizes are rounded up to pages on the disk; a manifest, a sentinel and the folder come on top.

    Without `alone`, of the files that only this rank writes.
    """
    files = plan.files if alone else [file for file in plan.files if not file.by_all]
    return sum(file.size + PAGE + file.size // BLOCK_BYTES * 64 for file in files) + (4 * PAGE if alone else 0)


class StagingBuffers:
    """Memory for whole copies of the state: made once, block by block, on a thread of its own."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._growing: threading.Thread | None = None
        self._stop = threading.Event()
        self._told = False

    def has_room(self, plan: Plan) -> bool:
        """Can the plan be staged now? If not, the room is made ready for the next time, if memory allows."""
        if self._pool.ready >= plan.blocks:
            return True
        if self.prepare(plan.blocks):
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
