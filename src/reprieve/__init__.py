"""Reprieve makes PyTorch training preemptible: stop it at any moment, resume it bit for bit."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from reprieve._version import __version__
from reprieve.errors import (
    CheckpointError,
    ConfigError,
    Fenced,
    FolderInUse,
    FolderNotWritable,
    InvalidCheckpoint,
    MissingExtra,
    NoValidCheckpoint,
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
    needing,
)

if TYPE_CHECKING:
    from reprieve.adapters.loop.run import Run
    from reprieve.checkpoint.checkpointer import Checkpointer
    from reprieve.checkpoint.results import Restored, Save
    from reprieve.preemption.process_exit import Preempted

__all__ = [
    "CheckpointError",
    "Checkpointer",
    "ConfigError",
    "Fenced",
    "FolderInUse",
    "FolderNotWritable",
    "InvalidCheckpoint",
    "MissingExtra",
    "NoValidCheckpoint",
    "OwnershipError",
    "Preempted",
    "RankFailed",
    "RanksError",
    "ReprieveError",
    "Restored",
    "Run",
    "Save",
    "StateError",
    "StateMismatch",
    "StorageError",
    "StorageFull",
    "StoreLost",
    "UnsafeState",
    "__version__",
]


_LAZY_MODULES = {
    "Checkpointer": "reprieve.checkpoint.checkpointer",
    "Preempted": "reprieve.preemption.process_exit",
    "Restored": "reprieve.checkpoint.results",
    "Run": "reprieve.adapters.loop.run",
    "Save": "reprieve.checkpoint.results",
}


def __getattr__(name: str) -> Any:
    """Import what needs torch at its first use, to keep `import reprieve` fast."""
    if name == "transformers":
        return import_module("reprieve.transformers")
    if name in _LAZY_MODULES:
        with needing(f"reprieve.{name}"):
            return getattr(import_module(_LAZY_MODULES[name]), name)
    raise AttributeError(f"module 'reprieve' has no attribute {name!r}")
