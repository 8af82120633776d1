"""Resolves the argument of a command that names a checkpoint, or a folder of checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reprieve.errors import ConfigError
from reprieve.storage.disk import explain
from reprieve.storage.uri import local_path

if TYPE_CHECKING:
    from reprieve.checkpoint.folder.catalog import CheckpointInfo


def checkpoints_at(uri: str) -> list[CheckpointInfo]:
    """Return the checkpoints of a folder, newest first, or the named checkpoint."""
    from reprieve.checkpoint.folder import paths
    from reprieve.checkpoint.folder.catalog import inspect_checkpoint, list_checkpoints
    from reprieve.checkpoint.format.manifest import MANIFEST

    path = local_path(uri)
    try:
        if not path.is_dir():
            raise ConfigError(f"{path} is not a folder" if path.exists() else f"{path} does not exist")
        if paths.step_of(path) is not None or (path / MANIFEST).exists():
            return [inspect_checkpoint(path)]
        return list_checkpoints(path)
    except OSError as error:
        explain(error, path)
