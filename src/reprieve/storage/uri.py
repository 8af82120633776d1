"""Where a checkpoint folder is, as the user writes it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from urllib.parse import unquote, urlsplit

from reprieve.errors import ConfigError

DRILL = "REPRIEVE_DRILL"
"""A folder: `reprieve drill` rehearses a preemption there, and the run's own checkpoints are not touched."""


def for_run(uri: str | os.PathLike[str], env: Mapping[str, str] = os.environ) -> Path:
    """Where a run that was told `uri` writes: there, or in a drill in the scratch folder."""
    path = local_path(uri)
    if not env.get(DRILL):
        return path
    return local_path(env[DRILL]) / f"{path.name}-{sha256(os.fsencode(path)).hexdigest()[:8]}"


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
