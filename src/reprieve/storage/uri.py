"""Where a checkpoint folder is, as the user writes it."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import unquote, urlsplit

from reprieve.errors import ConfigError


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
