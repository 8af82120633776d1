"""From a saved piece of a tensor to live memory: which of its bytes go where.

A piece lies in the file in row-major order. Of it a rank may want a box (other ranks have the rest), and the place that
it goes to may be a box in a larger tensor. Both fall into rows: runs of bytes that lie together on both sides. One
row is copied as it is, several through `RowsSink`. What cannot be put down directly (another type, odd strides)
goes to memory in between and is copied when all has arrived.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from reprieve.checkpoint.buffers.block_pool import Block
from reprieve.checkpoint.io.destinations import tensor_destination
from reprieve.checkpoint.io.reader import Target

_MOST_TARGETS = 1024
"""Boxes that fall into more groups of rows than this go through memory in between: a group costs about 10 µs."""


@dataclass(frozen=True, slots=True)
class Box:
    """A part of a saved piece."""

    shape: tuple[int, ...]
    """Of the piece."""
    dtype: torch.dtype
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.lengths) * self.dtype.itemsize

    @property
    def fits(self) -> bool:
        return len(self.offsets) == len(self.lengths) == len(self.shape) and all(
            0 <= offset <= offset + length <= size
            for offset, length, size in zip(self.offsets, self.lengths, self.shape, strict=True)
        )

    @property
    def whole(self) -> Box:
        return Box(self.shape, self.dtype, (0,) * len(self.shape), self.shape)


def targets_of(box: Box, into: torch.Tensor) -> list[Target] | None:
    """Where the box's bytes go, counted from the piece's first one. None if they cannot go there directly."""
    if box.size == 0:
        return []
    if not _is_reachable(box, into):
        return None
    cut = _row_start(box, into)
    if cut == len(box.lengths) > 0 or math.prod(box.lengths[: max(0, cut - 1)]) > _MOST_TARGETS:
        return None
    strides = [math.prod(box.shape[dim + 1 :]) * box.dtype.itemsize for dim in range(len(box.shape))]
    targets = []
    for at in itertools.product(*(range(length) for length in box.lengths[: max(0, cut - 1)])):
        start = sum((offset + index) * stride for offset, index, stride in zip(box.offsets, at, strides, strict=False))
        start += sum(offset * stride for offset, stride in zip(box.offsets[len(at) :], strides[len(at) :], strict=True))
        width = math.prod(box.lengths[cut:]) * box.dtype.itemsize
        if cut == 0:
            flat = into.as_strided((into.numel(),), (1,))  # a single element may have any stride
            targets.append(Target(start, width, tensor_destination(flat)))
        else:
            rows = into[at]
            flat = rows.as_strided((rows.shape[0], width // box.dtype.itemsize), (rows.stride(0), 1))
            length = (rows.shape[0] - 1) * strides[cut - 1] + width
            targets.append(Target(start, length, RowsSink(flat.view(torch.uint8), strides[cut - 1])))
    return targets


def in_between(box: Box) -> torch.Tensor:
    """Memory for the box alone, which `targets_of` can reach."""
    return torch.empty(box.lengths, dtype=box.dtype)


def _is_reachable(box: Box, into: torch.Tensor) -> bool:
    return (
        type(into) in (torch.Tensor, torch.nn.Parameter)
        and into.dtype == box.dtype
        and into.device.type in ("cpu", "cuda")
        and into.layout is torch.strided
        and not into.is_conj()
        and not into.is_neg()
        and not into.is_quantized
    )


def _row_start(box: Box, into: torch.Tensor) -> int:
    """The first dimension from which on the box lies in one run, in the piece and in its place."""
    dims = range(len(box.lengths))
    cut = max((dim for dim in dims if box.lengths[dim] != box.shape[dim]), default=0)
    wanted = 1
    for dim in reversed(dims):
        if box.lengths[dim] != 1 and into.stride(dim) != wanted:
            cut = max(cut, dim + 1)
            break
        wanted *= box.lengths[dim]
    while cut and box.lengths[cut - 1] == 1:  # a single row
        cut -= 1
    return cut


class RowsSink:
    """Rows that lie `stride` bytes apart in the piece; what is between them is wanted elsewhere, or nowhere."""

    __slots__ = ("_rows", "_stride")
    asynchronous = False

    def __init__(self, rows: torch.Tensor, stride: int) -> None:
        self._rows = rows
        """Live memory, as bytes: rows × width."""
        self._stride = stride

    def put(self, block: Block, at: int, start: int, stop: int) -> None:
        for row, count, first, last, skipped in self._pieces(start, stop):
            length = (count - 1) * self._stride + last - first
            source = torch.frombuffer(block.view, dtype=torch.uint8, count=length, offset=at + skipped)
            source = source.as_strided((count, last - first), (self._stride, 1))
            self._rows[row : row + count, first:last].copy_(source)

    def _pieces(self, start: int, stop: int) -> Iterator[tuple[int, int, int, int, int]]:
        """Row, how many, columns [first, last), and how far into [start, stop) they begin: partial rows apart."""
        width = self._rows.shape[1]
        at = start
        while at < stop:
            row, column = divmod(at, self._stride)
            whole = (stop - at) // self._stride if column == 0 else 0
            if whole:
                yield row, whole, 0, width, at - start
                at += whole * self._stride
                continue
            end = min(stop, (row + 1) * self._stride)
            last = min(end - row * self._stride, width)
            if column < last:
                yield row, 1, column, last, at - start
            at = end

    def finish(self) -> None:
        pass
