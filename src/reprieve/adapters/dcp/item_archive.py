"""Opens the archive of one item in a `.distcp` file, where `.metadata` does not say where the tensor's bytes are.

Reprieve's writer records that for plain tensors. Items of stock DCP, and tensors that are more than their bytes, are
read as torch files: the archive's directory and pickle describe the tensor, and only what `weights_only` allows is
unpickled. `saved_checkpoint.py` calls `open_item`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, cast

import torch

from reprieve.checkpoint.format.torch_unpickle import meta_storage
from reprieve.checkpoint.io.reader import CheckpointFile, Target
from reprieve.checkpoint.restore.torch_reader import TorchFile
from reprieve.errors import InvalidCheckpoint


class ItemSlice:
    """Bytes [offset, offset + length) of a file, with the interface that `TorchFile` needs of a CheckpointFile."""

    def __init__(self, file: CheckpointFile, name: str, offset: int, length: int) -> None:
        self.name = f"{file.name} ({name})"
        self.size = length
        self.targets: list[Target] = []
        self._file = file
        self._offset = offset
        if offset + length > file.size:
            raise file.bad(f"is cut short: {name} ends at byte {offset + length:,}, the file at {file.size:,}")

    def read(self, start: int, stop: int) -> bytes:
        if not 0 <= start <= stop <= self.size:
            raise self.bad(f"points to bytes {start} to {stop}, and ends at {self.size}")
        return self._file.read(self._offset + start, self._offset + stop)

    def bad(self, what: str) -> InvalidCheckpoint:
        error = self._file.bad(what)
        return InvalidCheckpoint(error.reason.replace(self._file.name, self.name, 1), path=error.path)


@dataclass(frozen=True, slots=True)
class PlainTensor:
    """A tensor whose bytes are in the slice, contiguous and in row-major order."""

    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def open_item(item: ItemSlice) -> PlainTensor | torch.Tensor:
    """Return where the tensor's bytes are; if it is not plain, the tensor itself, which `item.targets` will fill."""
    archive = TorchFile(cast(CheckpointFile, item))
    keys: list[str] = []

    def record_key(key: str, size: int, location: str) -> torch.UntypedStorage:
        keys.append(key)
        return meta_storage(key, size, location)

    tensor: torch.Tensor | None
    try:
        tensor = _tensor(item, archive.load(record_key))
    except InvalidCheckpoint:
        tensor = None  # some kinds of tensors cannot be made on the meta device
    if tensor is not None and len(keys) == 1 and _is_row_major(tensor):
        start, stop = archive.range(f"data/{keys[0]}")
        start += int(tensor.storage_offset()) * tensor.element_size()
        if start + tensor.nbytes > stop:
            raise item.bad("has fewer bytes than its tensor needs")
        return PlainTensor(start, tensor.dtype, tuple(tensor.shape))

    storages: dict[str, torch.UntypedStorage] = {}

    def make_storage(key: str, size: int, _location: str) -> torch.UntypedStorage:
        if key not in storages:
            storages[key] = torch.UntypedStorage(size)
            archive.read_into(key, storages[key])
        return storages[key]

    return _tensor(item, archive.load(make_storage))


def _tensor(item: ItemSlice, loaded: Any) -> torch.Tensor:
    if not isinstance(loaded, torch.Tensor):
        raise item.bad(f"holds {type(loaded).__name__} where a tensor should be")
    if loaded.layout is not torch.strided:
        raise item.bad("holds a sparse tensor, which DCP cannot load in parts")
    return loaded.detach()


def _is_row_major(tensor: torch.Tensor) -> bool:
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and not tensor.is_quantized
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
    )
