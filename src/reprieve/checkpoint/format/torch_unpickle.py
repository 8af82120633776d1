"""Unpickles the object tree of a torch file without running code that the file names.

The unpickler is torch's own `weights_only` one: it refuses what stock `torch.load` refuses, and allows types that the
user allowed with `torch.serialization.add_safe_globals`. It runs on the pickle alone. The caller decides what each
storage is: nothing (to learn the structure), a live tensor's memory, or fresh memory.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch import _weights_only_unpickler

from reprieve.errors import InvalidCheckpoint, UnsafeState

Storages = Callable[[str, int, str], torch.UntypedStorage]
"""Returns the storage for a key, its size in bytes and the location that it was saved from."""


def unpickle(name: str, pickled: bytes, storages: Storages, sparse: list[torch.Tensor] | None = None) -> Any:
    """Return the object tree, with storages from the caller. Runs nothing that is not known to be safe.

    Adds sparse tensors to `sparse`: their storages have no content yet, so they cannot be validated here.
    """

    def persistent_load(saved: tuple[Any, ...]) -> torch.storage.TypedStorage:
        tag, kind, key, location, count = saved
        if tag != "storage":
            raise pickle.UnpicklingError(f"unknown persistent id {tag!r}")
        dtype = torch.uint8 if kind is torch.UntypedStorage else kind.dtype
        storage = storages(key, count * dtype.itemsize, location)
        return torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)

    pending = torch._utils._sparse_tensors_to_validate  # the next torch.load must not find our tensors in it
    before = len(pending)
    unpickler = _weights_only_unpickler.Unpickler(io.BytesIO(pickled), encoding="utf-8")
    unpickler.persistent_load = persistent_load  # type: ignore[method-assign]
    try:
        return unpickler.load()
    except InvalidCheckpoint:
        raise
    except pickle.UnpicklingError as error:
        raise UnsafeState(f"{name} holds something that is not safe to load: {error}") from error
    except Exception as error:  # a hostile or damaged pickle can make the unpickler fail in any way
        raise InvalidCheckpoint(f"{name} has a pickle that cannot be read: {error!r}") from error
    finally:
        if sparse is not None:
            sparse += pending[before:]
        del pending[before:]


def meta_storage(_key: str, size: int, _location: str) -> torch.UntypedStorage:
    """Return a storage without memory, for callers that need only the structure."""
    return torch.UntypedStorage(size, device="meta")
