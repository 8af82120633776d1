"""One item of a `.distcp` file that has to be opened to be understood: a stock one, or more than plain bytes.

Our own writer says in `.metadata` where a plain tensor's bytes are. Otherwise the item's archive is read as a torch
file of its own: its directory and its pickle tell, and nothing in the pickle is run that `weights_only` would refuse.
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


class Slice:
    """Bytes [offset, offset + length) of a file, as if they were one. What `TorchFile` asks of a CheckpointFile."""

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
    """A tensor whose bytes lie in the slice whole and in row-major order."""

    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def open_item(piece: Slice) -> PlainTensor | torch.Tensor:
    """Where the tensor's bytes are. If it is not a plain one: the tensor, and `piece.targets` are what fills it."""
    archive = TorchFile(cast(CheckpointFile, piece))
    keys: list[str] = []

    def note(key: str, size: int, location: str) -> torch.UntypedStorage:
        keys.append(key)
        return meta_storage(key, size, location)

    tensor: torch.Tensor | None
    try:
        tensor = _tensor(piece, archive.load(note))
    except InvalidCheckpoint:
        tensor = None  # there are kinds that cannot be made without memory
    if tensor is not None and len(keys) == 1 and _is_row_major(tensor):
        start, stop = archive.range(f"data/{keys[0]}")
        start += int(tensor.storage_offset()) * tensor.element_size()
        if start + tensor.nbytes > stop:
            raise piece.bad("has fewer bytes than its tensor needs")
        return PlainTensor(start, tensor.dtype, tuple(tensor.shape))

    def fresh(key: str, size: int, _location: str) -> torch.UntypedStorage:
        if key not in made:
            made[key] = torch.UntypedStorage(size)
            archive.read_into(key, made[key])
        return made[key]

    made: dict[str, torch.UntypedStorage] = {}
    return _tensor(piece, archive.load(fresh))


def _tensor(piece: Slice, loaded: Any) -> torch.Tensor:
    if not isinstance(loaded, torch.Tensor):
        raise piece.bad(f"holds {type(loaded).__name__} where a tensor should be")
    if loaded.layout is not torch.strided:
        raise piece.bad("holds a sparse tensor, which DCP cannot load in parts")
    return loaded.detach()


def _is_row_major(tensor: torch.Tensor) -> bool:
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and not tensor.is_quantized
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
    )
