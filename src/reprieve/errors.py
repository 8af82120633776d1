"""Every error that Reprieve raises, as one tree.

    ReprieveError
    ├── ConfigError            a setting is wrong; the message says which and what would be right
    ├── StateError             the training state cannot be saved, or does not fit what was saved
    │   ├── UnsafeState        saved, it could not be loaded again (weights_only would refuse it)
    │   └── StateMismatch      missing or unexpected keys, shapes or dtypes
    ├── CheckpointError        about checkpoints on storage
    │   ├── InvalidCheckpoint  this one is not whole, not true or not trusted; the message says why
    │   └── NoValidCheckpoint    something is there, and none of it is valid
    ├── StorageError           the storage refused: permission, read-only, not a folder, an I/O error
    │   └── StorageFull        not enough room; names the bytes needed and the bytes free
    ├── OwnershipError         about who may write to a checkpoint folder
    │   ├── FolderInUse        another run, still alive, owns it
    │   └── Fenced             a newer attempt of the same run has taken over from us
    └── RanksError             the processes of a job could not agree
        ├── RankFailed         a rank said that it cannot go on, or did not answer in time
        └── StoreLost          the store that ranks talk through is gone (its host died)

Third-party errors are chained (`raise … from`), never leaked. A message says what happened, to which thing,
and what to do about it.
"""

from __future__ import annotations


class ReprieveError(Exception):
    """Base of all errors raised by Reprieve."""


class ConfigError(ReprieveError, ValueError):
    """A setting is wrong."""


class StateError(ReprieveError):
    """The training state cannot be saved, or does not fit what was saved."""


class UnsafeState(StateError):
    """The state could be saved, but not loaded again without running arbitrary code."""


class StateMismatch(StateError):
    """What was saved and what is there now differ in keys, shapes or dtypes."""


class CheckpointError(ReprieveError):
    """Something is wrong with a checkpoint on storage."""


class InvalidCheckpoint(CheckpointError):
    """One checkpoint is not whole, not true or not trusted. `reason` is fit for a table cell."""

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


class OwnershipError(ReprieveError):
    """Somebody else may write here, or we no longer may."""


class FolderInUse(OwnershipError):
    """Another live run owns the folder."""


class Fenced(OwnershipError):
    """A newer attempt of this run has taken over; this process must not write any more."""


class RanksError(ReprieveError):
    """The processes of a job could not agree."""


class RankFailed(RanksError):
    """A rank cannot go on, or did not answer in time. `rank` is None where several are meant. `for_a_person`: what
    happened there `is_permanent`."""

    def __init__(self, rank: int | None, reason: str, *, during: str | None = None, for_a_person: bool = False) -> None:
        self.rank = rank
        self.for_a_person = for_a_person
        self.reason = reason
        self.during = during
        who = f"rank {rank}: {reason}" if rank is not None else reason
        super().__init__(f"{during}: {who}" if during else who)

    def __reduce__(self) -> tuple[object, ...]:
        return _rank_failed, (self.rank, self.reason, self.during, self.for_a_person)


class StoreLost(RanksError):
    """The store that the ranks talk through cannot be reached any more."""


def is_permanent(error: BaseException) -> bool:
    """Started again, it would fail again: exit code 42."""
    ours = isinstance(error, ConfigError | StateError | NoValidCheckpoint | FolderInUse)
    return ours or (isinstance(error, RankFailed) and error.for_a_person)


def _rank_failed(rank: int | None, reason: str, during: str | None, for_a_person: bool) -> RankFailed:
    return RankFailed(rank, reason, during=during, for_a_person=for_a_person)
