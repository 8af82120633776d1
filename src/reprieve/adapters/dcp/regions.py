"""Maps the bytes of a saved chunk of a tensor to live memory.

A chunk is in the file in row-major order. A rank may need a box of it (other ranks have the rest), and that may go to
a box of a larger tensor. Both consist of rows: runs of bytes that are contiguous on both sides. A single row is copied
as it is, several go through `RowsDestination`. What cannot be copied directly (another dtype, unusual strides) goes to
a bounce buffer, and from there to its destination once all of it is read. `load_pass.py` uses this.
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

_MAX_TARGETS = 1024
"""Boxes with more groups of rows than this go through a bounce buffer: a group costs about 10 µs."""


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangular part of a saved chunk."""

    shape: tuple[int, ...]
    """The shape of the chunk."""
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


def make_targets(box: Box, into: torch.Tensor) -> list[Target] | None:
    """Return where the box's bytes go, with offsets from the chunk's first byte; None: not directly there."""
    if box.size == 0:
        return []
    if not _can_receive(box, into):
        return None
    cut = _row_start(box, into)
    if cut == len(box.lengths) > 0 or math.prod(box.lengths[: max(0, cut - 1)]) > _MAX_TARGETS:
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
            targets.append(Target(start, length, RowsDestination(flat.view(torch.uint8), strides[cut - 1])))
    return targets


def bounce_buffer(box: Box) -> torch.Tensor:
    """Allocate memory for the box alone. `make_targets` accepts it as a destination."""
    return torch.empty(box.lengths, dtype=box.dtype)


def _can_receive(box: Box, into: torch.Tensor) -> bool:
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
    """Return the first dimension from which on the box is contiguous, in the chunk and in live memory."""
    dims = range(len(box.lengths))
    cut = max((dim for dim in dims if box.lengths[dim] != box.shape[dim]), default=0)
    contiguous_stride = 1
    for dim in reversed(dims):
        if box.lengths[dim] != 1 and into.stride(dim) != contiguous_stride:
            cut = max(cut, dim + 1)
            break
        contiguous_stride *= box.lengths[dim]
    while cut and box.lengths[cut - 1] == 1:  # a single row
        cut -= 1
    return cut


class RowsDestination:
    """Live rows whose bytes are `stride` bytes apart in the chunk. The bytes between them are skipped."""

    __slots__ = ("_rows", "_stride")
    asynchronous = False

    def __init__(self, rows: torch.Tensor, stride: int) -> None:
        self._rows = rows
        """Live memory as bytes: rows × width."""
        self._stride = stride

    def put(self, block: Block, at: int, start: int, stop: int) -> None:
        for row, count, first, last, skipped in self._pieces(start, stop):
            length = (count - 1) * self._stride + last - first
            source = torch.frombuffer(block.view, dtype=torch.uint8, count=length, offset=at + skipped)
            source = source.as_strided((count, last - first), (self._stride, 1))
            self._rows[row : row + count, first:last].copy_(source)

    def _pieces(self, start: int, stop: int) -> Iterator[tuple[int, int, int, int, int]]:
        """Yield (row, number of rows, first column, end column, offset into [start, stop)); partial rows come alone."""
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
