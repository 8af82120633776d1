"""Finds the saved storages that can be read straight into live memory, by comparing a saved tree with a live one.

A pickled tree is loaded twice: first with storages that have no memory, to learn its structure and find the live
tensors that match it, then with the storages that the bytes are read into.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from reprieve.checkpoint.format.shards import is_sharded
from reprieve.checkpoint.format.torch_layout import tensors_in
from reprieve.checkpoint.format.torch_unpickle import Storages, meta_storage
from reprieve.checkpoint.restore.torch_reader import TorchFile


def matching_storages(file: TorchFile, live: Any) -> dict[str, torch.UntypedStorage]:
    """The live storages that saved ones can be read into: same path in the tree, same type, shape and layout."""
    tensors = dict(tensors_in(live))
    if not tensors:
        return {}
    matching: dict[str, torch.UntypedStorage] = {}
    shared: set[str | None] = set()
    tree, key_of = _structure(file)
    for path, saved in tensors_in(tree):
        key = key_of(saved) if saved.layout is torch.strided else None
        into = tensors.get(path)
        if key is None:
            continue
        if key in matching or key in shared or into is None or not _same_layout(saved, into):
            shared.add(key)
            matching.pop(key, None)
        else:
            matching[key] = into.untyped_storage()
    used = Counter(storage._cdata for storage in matching.values())
    return {key: storage for key, storage in matching.items() if used[storage._cdata] == 1}


def sharded_storages(
    file: TorchFile, params: Sequence[torch.Tensor]
) -> dict[str, tuple[tuple[Any, ...], torch.Tensor]]:
    """The storages of an optimizer's saved state that belong to sharded parameters, each with its path in the tree and
    the parameter. An optimizer that has made no step yet has no live state to match them with."""
    if not any(is_sharded(param) for param in params):
        return {}
    storages: dict[str, tuple[tuple[Any, ...], torch.Tensor]] = {}
    tree, key_of = _structure(file)
    for path, saved in tensors_in(tree):
        if len(path) < 3 or path[0] != "state" or not isinstance(path[1], int) or path[1] >= len(params):
            continue
        param, key = params[path[1]], key_of(saved)
        whole = saved.is_contiguous() and saved.nbytes == saved.untyped_storage().nbytes()
        if key is not None and is_sharded(param) and saved.shape == param.shape and saved.ndim and whole:
            storages[key] = (path, param)
    return storages


def with_tensors(tree: Any, tensors: Mapping[tuple[Any, ...], torch.Tensor], path: tuple[Any, ...] = ()) -> Any:
    """The tree, with the tensors at these paths replaced."""
    if path in tensors:
        return tensors[path]
    if isinstance(tree, dict):
        return type(tree)((key, with_tensors(value, tensors, (*path, key))) for key, value in tree.items())
    if isinstance(tree, list | tuple):
        return type(tree)(with_tensors(value, tensors, (*path, number)) for number, value in enumerate(tree))
    return tree


def _structure(file: TorchFile) -> tuple[Any, Callable[[torch.Tensor], str | None]]:
    """The tree with tensors that have no memory, and a function that returns the key of a tensor's storage."""
    keys: dict[int, tuple[str, torch.UntypedStorage]] = {}

    def storage(key: str, size: int, location: str) -> torch.UntypedStorage:
        out = meta_storage(key, size, location)
        keys[out._cdata] = (key, out)
        return out

    tree = file.load(once(storage))
    return tree, lambda tensor: keys.get(tensor.untyped_storage()._cdata, (None, None))[0]


def _same_layout(saved: torch.Tensor, live: torch.Tensor) -> bool:
    return (
        type(live) in (torch.Tensor, torch.nn.Parameter)
        and live.layout is torch.strided
        and not live.is_conj()
        and not live.is_neg()
        and (saved.dtype, saved.shape, saved.stride()) == (live.dtype, live.shape, live.stride())
        and saved.storage_offset() == live.storage_offset()
        and saved.untyped_storage().nbytes() == live.untyped_storage().nbytes()
        and live.device.type in ("cpu", "cuda")
    )


def once(storage: Storages) -> Storages:
    """The same function, called once per key: tensors that shared a storage when saved share it again."""
    made: dict[str, torch.UntypedStorage] = {}

    def cached(key: str, size: int, location: str) -> torch.UntypedStorage:
        if key not in made:
            made[key] = storage(key, size, location)
        return made[key]

    return cached
