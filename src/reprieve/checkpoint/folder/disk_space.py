"""Whether the disk has room for a checkpoint: checked at start-up and before every save, reported in numbers."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from reprieve.checkpoint.folder.catalog import CheckpointInfo
from reprieve.checkpoint.folder.retention import Retention
from reprieve.errors import StorageFull
from reprieve.storage.disk import free_bytes, free_files
from reprieve.units import format_size

log = logging.getLogger("reprieve")

_SPARE_FILES = 64
"""A save makes a dozen files and folders, or a few for each rank; a start also writes its lease record."""


def check_room(root: Path, needed: int, reclaimable: int = 0) -> None:
    """Raise StorageFull unless one more checkpoint fits. `reclaimable`: bytes of older ones that pruning will free."""
    free = free_bytes(root) + reclaimable
    if needed > free:
        raise StorageFull(
            28,
            f"no room for a checkpoint in {root}: {format_size(needed)} needed, {format_size(free)} free. "
            "Free some space or lower `keep`",
        )
    if not reclaimable and free_files(root) < _SPARE_FILES:
        raise StorageFull(
            28,
            f"no room for the files of a checkpoint in {root}: {free_files(root):.0f} inodes free. Remove some files",
        )


def warn_if_tight(root: Path, needed: int, retention: Retention, checkpoints: Sequence[CheckpointInfo]) -> bool:
    """Log a warning if `keep` + 1 checkpoints do not fit. Returns whether it did."""
    if retention.keep is None:
        return False
    valid = [checkpoint for checkpoint in checkpoints if checkpoint.problem is None]
    # The optimizer has no state before its first step: the newest checkpoint is the better estimate.
    size = max([needed, *(checkpoint.bytes for checkpoint in valid[:1])])
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
