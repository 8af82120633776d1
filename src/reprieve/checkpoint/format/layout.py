"""Layouts: the size of a file and where each of its bytes comes from, before any byte is moved.

`torch_layout` and `safetensors_layout` turn state into a `FileLayout`; `io/writer.py` fills blocks from it in the order
of offsets. The bytes of a `Segment` come from a `Source`. Bytes that depend on earlier ones (a CRC after its record, a
directory at the end) are `Deferred`: the writer renders them when it gets there.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from reprieve.checkpoint.buffers.block_pool import Block
from reprieve.checkpoint.format.shards import is_sharded, local_part, own_range, shards_of
from reprieve.storage.disk import PAGE

_ALIGNMENT = 64
_PAGES_FROM = 2**17
"""Data of this size or more starts at a page boundary. Then each rank's shard of most tensors does too, and ranks need
not send each other the rest of a page that they share (7 % of all bytes of small adapters, measured on 8 ranks). A
lower limit would grow the file by more than 3 %."""


def alignment_of(size: int) -> int:
    """Return the alignment of `size` bytes of data in a file, in both formats."""
    return PAGE if size >= _PAGES_FROM else _ALIGNMENT


class Source(Protocol):
    """Where the bytes of a segment come from."""

    def copy(self, block: Block, at: int, start: int, stop: int) -> None:
        """Copy bytes [start, stop) of this source to `at` in the block. A copy off a device may still run on return."""


class BytesSource:
    """Bytes that exist already: headers, pickles, JSON."""

    __slots__ = ("data",)

    def __init__(self, data: bytes) -> None:
        self.data = data

    def copy(self, block: Block, at: int, start: int, stop: int) -> None:
        block.view[at : at + stop - start] = self.data[start:stop]


class HostSource:
    """Memory of a CPU tensor or storage; `owner` keeps it alive."""

    __slots__ = ("address", "owner")

    def __init__(self, address: int, owner: object) -> None:
        self.address = address
        self.owner = owner

    def copy(self, block: Block, at: int, start: int, stop: int) -> None:
        ctypes.memmove(block.address + at, self.address + start, stop - start)


class DeviceSource:
    """Memory of a GPU, as a flat uint8 tensor. The caller sets the stream and waits for it."""

    __slots__ = ("flat",)

    def __init__(self, flat: torch.Tensor) -> None:
        self.flat = flat

    def copy(self, block: Block, at: int, start: int, stop: int) -> None:
        into = torch.frombuffer(block.view, dtype=torch.uint8, count=stop - start, offset=at)
        into.copy_(self.flat[start:stop], non_blocking=block.pinned)


class StridedSource:
    """A tensor that is not contiguous. A few rows at a time are made so: a large weight needs no second copy."""

    _ROWS_BYTES = 2**20

    def __init__(self, tensor: torch.Tensor) -> None:
        while tensor.shape[0] == 1:
            tensor = tensor[0]  # otherwise its only row would be the whole tensor
        self.tensor = tensor
        self.row_bytes = tensor.nbytes // tensor.shape[0]
        self.rows = max(1, self._ROWS_BYTES // max(1, self.row_bytes))
        self._first = -1
        self._source: Source = BytesSource(b"")

    def copy(self, block: Block, at: int, start: int, stop: int) -> None:
        group_bytes = self.rows * self.row_bytes
        while start < stop:
            group = start // group_bytes
            if group != self._first:
                rows = self.tensor[group * self.rows : (group + 1) * self.rows]
                # A new tensor each time: the copy of the previous one off the device may still run.
                self._source, self._first = source_of(rows.contiguous()), group
            inner = start - group * group_bytes
            count = min(stop - start, group_bytes - inner)
            self._source.copy(block, at, inner, inner + count)
            start += count
            at += count


def source_of(tensor: torch.Tensor) -> Source:
    """Return a source of the tensor's bytes in row-major order."""
    if tensor.is_conj() or tensor.is_neg():  # lazy views: their memory holds other values
        tensor = tensor.resolve_conj().resolve_neg()
    if not tensor.is_contiguous():
        return StridedSource(tensor)
    if tensor.device.type == "cpu":
        return HostSource(tensor.data_ptr(), tensor)
    return DeviceSource(flat_bytes(tensor))


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a contiguous tensor as a flat uint8 tensor."""
    # Not `reshape`: a tensor of one element may have any stride, and would keep it.
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


@dataclass(slots=True)
class Segment:
    """A range of a file, and the source of its bytes."""

    offset: int
    length: int
    source: Source | None
    """None if this rank does not hold the bytes."""
    crc: int = -1
    """The number of the CRC-32 that these bytes count towards; -1 for none."""
    label: str = ""
    """The name of the tensor that the bytes belong to, if any."""
    holders: tuple[int, ...] | None = None
    """The ranks that hold these bytes; None if all do."""

    def held_by(self, rank: int) -> bool:
        return self.holders is None or rank in self.holders


@dataclass(slots=True)
class Deferred:
    """A range of a file whose bytes depend on CRCs of earlier ranges."""

    offset: int
    length: int
    render: Callable[[list[int]], bytes]
    needs: int | None
    """The number of the CRC that `render` needs; None if it needs all."""


@dataclass(frozen=True, slots=True)
class Pickled:
    """A pickle without the contents of its storages."""

    data: bytes
    storages: list[Any]
    """Storages, and sharded tensors in place of one, in the order of their keys."""
    used: set[object]
    """The classes and functions that unpickling looks up."""
    tree: object
    """What was pickled."""


@dataclass(slots=True)
class FileLayout:
    """The layout of one file. Segments are in the order of offsets, without gaps."""

    name: str
    size: int
    segments: Sequence[Segment | Deferred] = field(repr=False)
    crcs: int = 0
    """How many CRCs the segments count towards."""

    devices: frozenset[torch.device] = frozenset()
    """The GPUs that the bytes come from."""

    pickled: Pickled | None = field(default=None, repr=False)
    """The file's pickle, if it has one."""

    is_shared: bool = False
    """Whether all ranks have this layout and each writes a part; otherwise the file belongs to this rank alone."""


class LayoutBuilder:
    """Builder of a layout: appends segments one after the other."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.size = 0
        self.crcs = 0
        self._segments: list[Segment | Deferred] = []
        self._devices: set[torch.device] = set()

    def add_bytes(self, data: bytes) -> None:
        if data:
            self._segments.append(Segment(self.size, len(data), BytesSource(data)))
            self.size += len(data)

    def add_source(
        self,
        source: Source | None,
        length: int,
        *,
        crc: int = -1,
        device: torch.device | None = None,
        label: str = "",
        holders: tuple[int, ...] | None = None,
    ) -> None:
        if length:
            self._segments.append(Segment(self.size, length, source, crc, label, holders))
            self.size += length
        if device is not None and device.type != "cpu":
            self._devices.add(device)

    def add_tensor(
        self, name: str, tensor: torch.Tensor, *, crc: int = -1, holders: tuple[int, ...] | None = None
    ) -> None:
        """Append a tensor's bytes in row-major order. Of a sharded tensor, only this rank's shard has a source."""
        if not is_sharded(tensor):
            tensor = tensor.detach()
            self.add_source(
                source_of(tensor) if tensor.nbytes else None,
                tensor.nbytes,
                crc=crc,
                device=tensor.device,
                label=name,
                holders=holders,
            )
            return
        own, local = own_range(name, tensor), local_part(tensor)
        for shard in shards_of(name, tensor):
            source = source_of(local) if (shard.start, shard.stop) == own else None
            self.add_source(
                source, shard.stop - shard.start, crc=crc, device=local.device, label=name, holders=shard.holders
            )

    def new_crc(self) -> int:
        """Return the number of a new CRC that segments can count towards."""
        self.crcs += 1
        return self.crcs - 1

    def add_deferred(self, length: int, render: Callable[[list[int]], bytes], *, needs: int | None) -> None:
        self._segments.append(Deferred(self.size, length, render, needs))
        self.size += length

    def build(self, pickled: Pickled | None = None) -> FileLayout:
        return FileLayout(self.name, self.size, self._segments, self.crcs, frozenset(self._devices), pickled)


def devices_of(layouts: Iterable[FileLayout]) -> set[torch.device]:
    """Return the GPUs that the bytes of these files come from."""
    return set[torch.device]().union(*(layout.devices for layout in layouts))


def bytes_layout(name: str, data: bytes) -> FileLayout:
    """Return the layout of a file with this content, such as JSON."""
    builder = LayoutBuilder(name)
    builder.add_bytes(data)
    return builder.build()
