"""The files of one checkpoint as the source of a restore: which there are, and where their tensors are read to.

`StateLoader` and `ModuleLoader` name the tensors that they need; the reader fills them in one verified pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from reprieve.checkpoint.format.manifest import Manifest
from reprieve.checkpoint.format.shards import from_local, is_sharded, local_part, own_range
from reprieve.checkpoint.format.torch_unpickle import meta_storage
from reprieve.checkpoint.io.destinations import tensor_destination
from reprieve.checkpoint.io.reader import CheckpointFile, Reader, Target
from reprieve.checkpoint.restore.storage_matching import matching_storages, once, sharded_storages, with_tensors
from reprieve.checkpoint.restore.torch_reader import TorchFile


class CheckpointSource:
    """The files of one checkpoint, opened through the verifying reader."""

    def __init__(self, folder: Path, manifest: Manifest | None, reader: Reader) -> None:
        self.folder = folder
        self.manifest = manifest
        self._reader = reader
        self.checks: list[Callable[[], object]] = []
        """What to check once the bytes are there."""

    def has(self, name: str) -> bool:
        return name in self.manifest.files if self.manifest is not None else (self.folder / name).is_file()

    def open(self, name: str) -> CheckpointFile:
        return self._reader.open(name, self.manifest.files[name] if self.manifest is not None else None)

    def read_tensor(self, file: CheckpointFile, start: int, name: str, like: torch.Tensor, into: torch.Tensor) -> None:
        """Have the reader fill `into` with the tensor whose bytes begin at `start`; if `like` is sharded, with this
        rank's shard of it."""
        first = 0
        if is_sharded(like):
            file.only_targets = True
            first, _ = own_range(name, like)
        if into.nbytes:
            file.targets.append(Target(start + first, into.nbytes, tensor_destination(into)))

    def load_tree(self, name: str, live: Any, params: Sequence[torch.Tensor] = ()) -> Any:
        """The object tree of a torch file. The reader fills its storages later: live memory where the trees match.

        `params`: the parameters of an optimizer, whose sharded state is read shard by shard.
        """
        file = TorchFile(self.open(name))
        matching = matching_storages(file, live)
        sharded = sharded_storages(file, params)

        def storage(key: str, size: int, location: str) -> torch.UntypedStorage:
            if key in sharded:
                return meta_storage(key, size, location)
            target = matching.get(key)
            if target is None:
                target = torch.UntypedStorage(size, device=_device(location))
            file.read_into(key, target)
            return target

        sparse: list[torch.Tensor] = []
        tree = file.load(once(storage), sparse)
        self.checks.append(partial(file.validate, sparse))
        if not sharded:
            return tree
        tensors = {}
        for key, (path, like) in sharded.items():
            into = torch.empty_like(
                local_part(like), memory_format=torch.contiguous_format, dtype=_dtype_at(tree, path)
            )
            self.read_tensor(file.file, file.range(f"data/{key}")[0], f"{name}: {path}", like, into)
            tensors[path] = from_local(into, like)
        return with_tensors(tree, tensors)


def _device(location: str) -> torch.device:
    """The device for a saved tensor without a live counterpart: the type that it was saved from, if available."""
    if location.startswith("cuda") and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _dtype_at(tree: Any, path: tuple[Any, ...]) -> torch.dtype:
    for key in path:
        tree = tree[key]
    return tree.dtype  # type: ignore[no-any-return]
