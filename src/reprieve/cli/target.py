"""What a command's argument names: a folder of checkpoints, or one checkpoint in it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from reprieve.errors import ConfigError
from reprieve.storage.uri import local_path

if TYPE_CHECKING:
    from reprieve.checkpoint.survey import Found


def checkpoints_at(uri: str) -> list[Found]:
    """The checkpoints of a folder, newest first, or the one that is named."""
    from reprieve.checkpoint import names
    from reprieve.checkpoint.manifest import MANIFEST
    from reprieve.checkpoint.survey import look_at, survey

    path = folder_at(uri)
    if names.step_of(path) is not None or (path / MANIFEST).exists():
        return [look_at(path)]
    return survey(path)


def folder_at(uri: str) -> Path:
    path = local_path(uri)
    if not path.is_dir():
        raise ConfigError(f"{path} is not a folder" if path.exists() else f"{path} does not exist")
    return path
