"""Sharded tensors (`DTensor`): which rank holds which bytes of the whole tensor.

A file stores the whole tensor contiguously. A tensor that is sharded along its first dimension consists of contiguous
ranges, each held by one rank or by several replicas (HSDP), so ranks write them in place without gathering. Any other
placement would scatter a rank's bytes over the file row by row; it raises StateError.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Sequence
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
    """Return whether the value is a DTensor, without importing a module that a plain run never needs."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def whole_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of all shards together, or of a plain tensor."""
    return tensor.numel() * tensor.element_size()


def local_part(tensor: Any) -> torch.Tensor:
    """Return the shard that this rank holds."""
    with torch.no_grad():  # otherwise autograd records the view, which is a hundred times as slow
        local: torch.Tensor = tensor.to_local()
    return (local.wait() if hasattr(local, "wait") else local).detach()


def shards_of(name: str, tensor: Any) -> list[Shard]:
    """Return the ranges that cover the whole tensor, in order. They are the same on every rank."""
    rows, row_bytes = _rows(tensor)
    _check_placements(name, tensor)
    return [
        Shard(first * row_bytes, last * row_bytes, holders)
        for first, last, holders in _held(tensor.device_mesh, tensor.placements, rows)
    ]


def own_range(name: str, tensor: Any) -> tuple[int, int]:
    """Return which bytes of the whole tensor `local_part` is."""
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:  # this rank is not in the tensor's mesh
        return 0, 0
    rows, row_bytes = _rows(tensor)
    _check_placements(name, tensor)
    first, last = _rows_at(coordinate, tensor.device_mesh.shape, tensor.placements, rows)
    if (last - first) * row_bytes != local_part(tensor).nbytes:
        raise StateError(f"{name} is sharded over the ranks in a way that Reprieve does not know: {tensor.placements}")
    return first * row_bytes, last * row_bytes


def from_local(local: torch.Tensor, like: Any) -> torch.Tensor:
    """Return a tensor that is sharded as `like` is, with `local` as this rank's shard."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def _rows(tensor: Any) -> tuple[int, int]:
    """Return the number of rows and the bytes of each."""
    rows = tensor.shape[0] if tensor.ndim else 1
    return rows, whole_bytes(tensor) // rows if rows else 0


def _check_placements(name: str, tensor: Any) -> None:
    for placement in tensor.placements:
        if not placement.is_replicate() and (type(placement).__name__ != "Shard" or placement.dim != 0):
            raise StateError(
                f"{name} is placed as {placement} over the ranks; only Shard(0) and Replicate() can be written into "
                "one file without gathering. Save it with torch.distributed.checkpoint and reprieve.dcp.StorageWriter, "
                "which take any placement"
            )


@functools.lru_cache(maxsize=1024)
def _held(mesh: Any, placements: tuple[Any, ...], rows: int) -> list[tuple[int, int, tuple[int, ...]]]:
    """Return ranges of rows with the ranks that hold them. Cached: a large mesh takes long, and row counts repeat."""
    holders: dict[tuple[int, int], list[int]] = {}
    coordinates = itertools.product(*(range(count) for count in mesh.shape))
    for coordinate, rank in zip(coordinates, mesh.mesh.flatten().tolist(), strict=True):
        first, last = _rows_at(coordinate, mesh.shape, placements, rows)
        if first < last:
            holders.setdefault((first, last), []).append(rank)
    return [(first, last, tuple(sorted(ranks))) for (first, last), ranks in sorted(holders.items())]


def _rows_at(coordinate: Sequence[int], shape: Sequence[int], placements: Sequence[Any], rows: int) -> tuple[int, int]:
    first, last = 0, rows
    for placement, count, index in zip(placements, shape, coordinate, strict=True):
        if not placement.is_replicate():
            # As torch.chunk does: shards of equal size, the last ones shorter or empty.
            size = -(-(last - first) // count)
            first, last = min(first + index * size, last), min(first + (index + 1) * size, last)
    return first, last
