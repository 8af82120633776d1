"""Turns what a user writes for a checkpoint folder into a path.

In a drill (`REPRIEVE_DRILL`), paths are moved to a scratch folder, so that the run's own checkpoints are not touched.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from urllib.parse import unquote, urlsplit

from reprieve.errors import ConfigError


def run_folder(uri: str | os.PathLike[str], drill: str | None) -> Path:
    """Return the folder that a run with the checkpoints `uri` writes to.

    `drill`: the scratch folder of a drill, which takes the place of the root folder.
    """
    path = local_path(uri)
    if drill is None or path.is_relative_to(scratch := local_path(drill)):
        return path
    return scratch / path.relative_to(path.anchor)


def original_path(uri: str | os.PathLike[str], drill: str | None) -> Path:
    """Return the path that `uri` has outside of a drill: the inverse of `run_folder`."""
    path = local_path(uri)
    if drill is None or not path.is_relative_to(scratch := local_path(drill)):
        return path
    return Path(path.anchor) / path.relative_to(scratch)


def local_path(uri: str | os.PathLike[str]) -> Path:
    """Convert a path or a `file://` URI to an absolute path, with `~` expanded."""
    text = os.fspath(uri)
    if not text:
        raise ConfigError("the checkpoint folder is an empty string")
    if "://" in text:
        parts = urlsplit(text)
        if parts.scheme != "file" or parts.netloc not in ("", "localhost"):
            raise ConfigError(
                f"{text!r}: this version writes to local and mounted folders only. Use a path or file:///…"
            )
        text = unquote(parts.path)
    return Path(text).expanduser().absolute()


def display_path(path: Path) -> str:
    """Format a path for messages: relative if it is inside the current folder."""
    with contextlib.suppress(ValueError, OSError):
        return os.fspath(path.absolute().relative_to(Path.cwd()))
    return os.fspath(path)
