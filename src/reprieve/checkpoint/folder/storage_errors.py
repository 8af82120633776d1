"""Turns an OSError of the storage into one that tells the user what to do, in `with` blocks and as decorators."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from reprieve.errors import FolderNotWritable
from reprieve.storage.disk import explain


@contextlib.contextmanager
def explained(root: Path, *, needed: int | None = None) -> Iterator[None]:
    """Raise StorageError in place of an OSError. `needed`: the bytes that a save needs, for the message."""
    try:
        yield
    except OSError as error:
        explain(error, root, needed=needed)


@contextlib.contextmanager
def permitted(root: Path) -> Iterator[None]:
    """Raise FolderNotWritable, a permanent failure, where there is no permission, or a file in place of the folder.
    Only at the start of a run: later the folder could be written once, and perhaps will be again."""
    try:
        yield
    except (FileExistsError, NotADirectoryError) as error:
        raise FolderNotWritable(
            errno.ENOTDIR,
            f"cannot use {root} for checkpoints: there is a file where the folder should be (at "
            f"{error.filename or root}). Choose another folder, or move the file away",
        ) from error
    except PermissionError as error:
        raise FolderNotWritable(
            error.errno,
            f"cannot use {root} for checkpoints: no permission for uid {os.geteuid()}, gid {os.getegid()} (at "
            f"{error.filename or root}). Change the owner of the folder, or in a pod set securityContext.fsGroup to a "
            "group that may write to it",
        ) from error
