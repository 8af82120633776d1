"""Every error that Reprieve raises, as one tree.

    ReprieveError
    ├── ConfigError            a setting is wrong; the message names it and a right value
    ├── MissingExtra           an optional dependency is not installed; the message names the extra
    ├── StateError             the training state cannot be saved, or does not fit what was saved
    │   ├── UnsafeState        the state could not be loaded again: weights_only would refuse it
    │   └── StateMismatch      missing or unexpected keys, shapes or dtypes
    ├── CheckpointError        about checkpoints on storage
    │   ├── InvalidCheckpoint  one checkpoint is incomplete, damaged or not trusted; the message says why
    │   └── NoValidCheckpoint  there are checkpoints, and none of them is valid
    ├── StorageError           the storage refused: permission, read-only, not a folder, an I/O error
    │   ├── StorageFull        not enough room; names the bytes needed and the bytes free
    │   └── FolderNotWritable  this user may not write to the checkpoint folder; names the uid
    ├── OwnershipError         about the right to write to a checkpoint folder
    │   ├── FolderInUse        another run, still alive, holds the folder's lease
    │   └── Fenced             a newer attempt of the same run has taken over
    ├── RanksError             the processes of a job could not agree
    │   ├── RankFailed         a rank failed, or did not answer in time
    │   └── StoreLost          the store that ranks communicate through is gone (its host died)
    └── KubernetesError        the Kubernetes API refused a request; has its message
        ├── ObjectNotFound     the object, or its kind, does not exist
        ├── ObjectChanged      somebody else changed the object in the meantime, or created it: read it again
        ├── NotPermitted       the credentials do not allow it; names them and the missing permission
        └── ApiUnreachable     the API server did not answer

Third-party errors are chained (`raise … from`), never leaked. A message says what happened, to which thing, and what
to do about it. Where users enter code that needs an optional dependency, such as torch, the import is wrapped in
`needing`, which names the extra that installs it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

_EXTRAS = {
    "torch": "torch",
    "transformers": "transformers",
    "accelerate": "transformers",
    "ray": "ray",
    **dict.fromkeys(("kubeflow", "kubernetes"), "kubeflow"),
    **dict.fromkeys(("cryptography", "httpx2", "lightkube", "starlette", "uvicorn"), "operator"),
    **dict.fromkeys(("datasets", "huggingface_hub", "peft", "PIL", "trl", "yaml"), "finetune"),
}
"""Package → the extra of Reprieve that installs it."""


class ReprieveError(Exception):
    """Base of all errors raised by Reprieve."""


class ConfigError(ReprieveError, ValueError):
    """A setting is wrong."""


class MissingExtra(ReprieveError, ImportError):
    """An optional dependency, such as torch, is not installed."""


class StateError(ReprieveError):
    """The training state cannot be saved, or does not fit what was saved."""


class UnsafeState(StateError):
    """The state could be saved, but not loaded again without running arbitrary code."""


class StateMismatch(StateError):
    """The saved state and the live one differ in keys, shapes or dtypes."""


class CheckpointError(ReprieveError):
    """Something is wrong with a checkpoint on storage."""


class InvalidCheckpoint(CheckpointError):
    """One checkpoint is incomplete, damaged or not trusted. `reason` is short enough for a table cell."""

    def __init__(self, reason: str, *, path: object = None) -> None:
        self.reason = reason
        self.path = path
        super().__init__(f"{path}: {reason}" if path is not None else reason)


class NoValidCheckpoint(CheckpointError):
    """There are checkpoints, and none of them is valid."""


class StorageError(ReprieveError, OSError):
    """The storage refused an operation."""

    def __str__(self) -> str:
        return self.strerror or super().__str__()


class StorageFull(StorageError):
    """Not enough room for a checkpoint."""


class FolderNotWritable(StorageError):
    """The checkpoint folder is a file, or this process's user may not write to it."""


class OwnershipError(ReprieveError):
    """This process may not, or no longer, write to a checkpoint folder."""


class FolderInUse(OwnershipError):
    """Another live run holds the folder's lease."""


class Fenced(OwnershipError):
    """A newer attempt of this run has taken over; this process must not write any more."""


class RanksError(ReprieveError):
    """The processes of a job could not agree."""


class RankFailed(RanksError):
    """A rank failed, or did not answer in time.

    `rank` is None if several did. `permanent`: the error of that rank is a permanent failure.
    """

    def __init__(self, rank: int | None, reason: str, *, during: str | None = None, permanent: bool = False) -> None:
        self.rank = rank
        self.permanent = permanent
        self.reason = reason
        self.during = during
        who = f"rank {rank}: {reason}" if rank is not None else reason
        super().__init__(f"{during}: {who}" if during else who)

    def __reduce__(self) -> tuple[object, ...]:
        return _rank_failed, (self.rank, self.reason, self.during, self.permanent)


class StoreLost(RanksError):
    """The store that the ranks communicate through cannot be reached any more."""


class KubernetesError(ReprieveError):
    """The Kubernetes API refused a request."""


class ObjectNotFound(KubernetesError):
    """The object, or its kind, does not exist."""


class ObjectChanged(KubernetesError):
    """Somebody else changed the object in the meantime, or created it."""


class NotPermitted(KubernetesError):
    """The credentials do not allow the request."""


class ApiUnreachable(KubernetesError):
    """The API server did not answer, or cannot do so at present: it is overloaded, or something behind it is away."""


_PERMANENT = (ConfigError, MissingExtra, StateError, NoValidCheckpoint, FolderInUse, FolderNotWritable)


def is_permanent(error: BaseException) -> bool:
    """Whether the error is a permanent failure: a restart would fail again. Exit code 42."""
    if isinstance(error, RankFailed):
        return error.permanent
    return isinstance(error, _PERMANENT)


@contextlib.contextmanager
def needing(what: str) -> Iterator[None]:
    """Raise MissingExtra, in one line, where `what` imports an optional dependency that is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _EXTRAS:
            raise
        raise MissingExtra(
            f"{what} needs {package}, which is not installed: pip install 'reprieve[{_EXTRAS[package]}]'"
        ) from None


def _rank_failed(rank: int | None, reason: str, during: str | None, permanent: bool) -> RankFailed:
    return RankFailed(rank, reason, during=during, permanent=permanent)
