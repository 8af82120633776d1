"""Which saved storages can be read straight into live memory: a saved tree beside a live one.

A pickled tree is loaded twice: first with storages that have no memory, to learn its structure and find the live
tensors that match it, then with the storages that the bytes are read into.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from reprieve.checkpoint.torch_file import tensors_in
from reprieve.checkpoint.torch_load import Storages, TorchFile, meta_storage


def matching_storages(file: TorchFile, live: Any) -> dict[str, torch.UntypedStorage]:
    """Live storages that saved ones can be read into: the same place in the tree, the same type, shape and layout."""
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


def _structure(file: TorchFile) -> tuple[Any, Callable[[torch.Tensor], str | None]]:
    """The tree with tensors that have no memory, and the key of each tensor's storage."""
    held: dict[int, tuple[str, torch.UntypedStorage]] = {}

    def storage(key: str, size: int, location: str) -> torch.UntypedStorage:
        out = meta_storage(key, size, location)
        held[out._cdata] = (key, out)
        return out

    tree = file.load(once(storage))
    return tree, lambda tensor: held.get(tensor.untyped_storage()._cdata, (None, None))[0]


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
    """Tensors that were saved sharing a storage come back sharing it."""
    seen: dict[str, torch.UntypedStorage] = {}

    def cached(key: str, size: int, location: str) -> torch.UntypedStorage:
        if key not in seen:
            seen[key] = storage(key, size, location)
        return seen[key]

    return cached
