"""Reads every byte of one checkpoint and verifies it against its manifest, or, without one, its own structure."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from reprieve.checkpoint.buffers.block_pool import BlockPool
from reprieve.checkpoint.folder.catalog import CheckpointInfo, inspect_checkpoint
from reprieve.checkpoint.folder.foreign import check_foreign
from reprieve.checkpoint.io.reader import Cache, Reader
from reprieve.errors import InvalidCheckpoint


def verify(
    path: Path,
    pool: BlockPool,
    *,
    progress: Callable[[int], None] | None = None,
    cache: Cache = Cache.AVOID,
    select: Callable[[int], bool] = lambda index: True,
) -> CheckpointInfo:
    """Read every byte of a checkpoint; InvalidCheckpoint names the first problem. `select`: see `Reader.run`."""
    try:
        checkpoint = inspect_checkpoint(path)
    except FileNotFoundError as error:
        raise InvalidCheckpoint("there is no such checkpoint", path=path) from error
    checkpoint.check()
    if checkpoint.manifest is None:
        check_foreign(path, progress=progress)
        return checkpoint
    with Reader(path, pool, block_bytes=checkpoint.manifest.block_bytes, cache=cache) as reader:
        for name, entry in checkpoint.manifest.files.items():
            reader.open(name, entry)
        reader.run(progress=progress, select=select)
    return checkpoint
