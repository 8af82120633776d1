"""Tensors that are spread over ranks (`DTensor`): which rank holds which bytes of the whole.

A whole tensor is one run of bytes in a file. What is sharded along its first dimension falls into as many ranges, one
after the other, each held by one rank or by several replicas (HSDP): they are written to their places without being
gathered. Any other placement would scatter a rank's bytes over the file a row at a time; it is refused by name.
"""

from __future__ import annotations

import itertools
import sys
from dataclasses import dataclass
from typing import Any

import torch

from reprieve.errors import StateError


@dataclass(frozen=True, slots=True)
class Shard:
    """Bytes [start, stop) of a whole tensor, and the ranks that hold them."""

    start: int
    stop: int
    holders: tuple[int, ...]


def is_sharded(value: object) -> bool:
    """Is it a DTensor? Asked without importing what a plain run never needs."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def whole_bytes(tensor: torch.Tensor) -> int:
    """Of all shards together; a plain tensor's own."""
    return tensor.numel() * tensor.element_size()


def local_part(tensor: Any) -> torch.Tensor:
    """The shard that this rank holds."""
    local: torch.Tensor = tensor.detach().to_local()
    return local.wait() if hasattr(local, "wait") else local


def shards_of(name: str, tensor: Any) -> list[Shard]:
    """The ranges that cover the whole tensor, in order. The same on every rank."""
    rows = tensor.shape[0] if tensor.ndim else 1
    row_bytes = whole_bytes(tensor) // rows if rows else 0
    holders: dict[tuple[int, int], list[int]] = {}
    ranks = tensor.device_mesh.mesh
    for coordinate in itertools.product(*(range(count) for count in ranks.shape)):
        held = _rows_at(name, tensor, coordinate, rows)
        if held[0] < held[1]:
            holders.setdefault(held, []).append(int(ranks[coordinate]))
    return [
        Shard(first * row_bytes, last * row_bytes, tuple(sorted(who))) for (first, last), who in sorted(holders.items())
    ]


def own_range(name: str, tensor: Any) -> tuple[int, int]:
    """The bytes of the whole tensor that `local_part` is."""
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:  # this rank is not in the tensor's mesh
        return 0, 0
    rows = tensor.shape[0] if tensor.ndim else 1
    row_bytes = whole_bytes(tensor) // rows if rows else 0
    first, last = _rows_at(name, tensor, tuple(coordinate), rows)
    if (last - first) * row_bytes != local_part(tensor).nbytes:
        raise StateError(f"{name} is spread over the ranks in a way that is not known here: {tensor.placements}")
    return first * row_bytes, last * row_bytes


def from_local(local: torch.Tensor, like: Any) -> torch.Tensor:
    """A tensor that is spread over the ranks as `like` is, with this shard of it here."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def _rows_at(name: str, tensor: Any, coordinate: tuple[int, ...], rows: int) -> tuple[int, int]:
    first, last = 0, rows
    for place, count, index in zip(tensor.placements, tensor.device_mesh.mesh.shape, coordinate, strict=True):
        if place.is_replicate():
            continue
        if type(place).__name__ != "Shard" or place.dim != 0:
            raise StateError(
                f"{name} is placed as {place} over the ranks; only Shard(0) and Replicate() can be written into one "
                "file without gathering. Save it with torch.distributed.checkpoint and reprieve.dcp.StorageWriter, "
                "which take any placement"
            )
        # As torch.chunk does: all of one size, the last ones shorter or empty.
        size = -(-(last - first) // count)
        first, last = min(first + index * size, last), min(first + (index + 1) * size, last)
    return first, last
