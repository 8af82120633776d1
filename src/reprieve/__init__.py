"""Reprieve: training that can be stopped."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from reprieve._version import __version__
from reprieve.errors import (
    CheckpointError,
    ConfigError,
    Fenced,
    FolderInUse,
    InvalidCheckpoint,
    NothingToResume,
    OwnershipError,
    RankFailed,
    RanksError,
    ReprieveError,
    StateError,
    StateMismatch,
    StorageError,
    StorageFull,
    StoreLost,
    UnsafeState,
)

if TYPE_CHECKING:
    from reprieve.checkpoint.checkpointer import Checkpointer, Restored, Save

__all__ = [
    "CheckpointError",
    "Checkpointer",
    "ConfigError",
    "Fenced",
    "FolderInUse",
    "InvalidCheckpoint",
    "NothingToResume",
    "OwnershipError",
    "RankFailed",
    "RanksError",
    "ReprieveError",
    "Restored",
    "Save",
    "StateError",
    "StateMismatch",
    "StorageError",
    "StorageFull",
    "StoreLost",
    "UnsafeState",
    "__version__",
]


def __getattr__(name: str) -> Any:
    """What needs torch is imported when it is asked for: `import reprieve` stays light."""
    if name in ("Checkpointer", "Restored", "Save"):
        from reprieve.checkpoint import checkpointer

        return getattr(checkpointer, name)
    raise AttributeError(f"module 'reprieve' has no attribute {name!r}")
