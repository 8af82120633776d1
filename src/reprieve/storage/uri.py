"""Where a checkpoint folder is, as the user writes it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import unquote, urlsplit

from reprieve.errors import ConfigError

DRILL = "REPRIEVE_DRILL"
"""A folder: `reprieve drill` rehearses a preemption there, and the run's own checkpoints are not touched."""


def for_run(uri: str | os.PathLike[str], env: Mapping[str, str] = os.environ) -> Path:
    """Where a run that was told `uri` writes: there, or in a drill in the scratch folder."""
    path = local_path(uri)
    if not env.get(DRILL) or path.is_relative_to(scratch := local_path(env[DRILL])):
        return path
    return scratch / path.relative_to(path.anchor)


def original_path(uri: str | os.PathLike[str], env: Mapping[str, str] = os.environ) -> Path:
    """The folder that stands for `uri` outside of a drill: what `for_run` was given."""
    path = local_path(uri)
    if not env.get(DRILL) or not path.is_relative_to(scratch := local_path(env[DRILL])):
        return path
    return Path(path.anchor) / path.relative_to(scratch)


def local_path(uri: str | os.PathLike[str]) -> Path:
    """A path or a `file://` URI, absolute and with `~` expanded."""
    text = os.fspath(uri)
    if not text:
        raise ConfigError("the checkpoint folder is an empty string")
    if "://" in text:
        parts = urlsplit(text)
        if parts.scheme != "file" or parts.netloc not in ("", "localhost"):
            raise ConfigError(
                f"{text!r}: this version writes to local and mounted folders only; give a path or file:///…"
            )
        text = unquote(parts.path)
    return Path(text).expanduser().absolute()


def shown(path: Path) -> str:
    """As a person would write it: relative, where it is in the current folder."""
    with contextlib.suppress(ValueError, OSError):
        return os.fspath(path.absolute().relative_to(Path.cwd()))
    return os.fspath(path)
