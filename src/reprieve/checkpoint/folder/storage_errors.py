"""Turns an OSError of the storage into one that tells the user what to do, in `with` blocks and as a decorator."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from reprieve.storage.disk import explain


@contextlib.contextmanager
def explained(root: Path, *, needed: int | None = None) -> Iterator[None]:
    """Raise StorageError in place of an OSError. `needed`: the bytes that a save needs, for the message."""
    try:
        yield
    except OSError as error:
        explain(error, root, needed=needed)
