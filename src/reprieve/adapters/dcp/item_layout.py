"""The items of a save plan become one file: each a whole `torch.save` archive, as in a stock `.distcp` file.

An item's archive is laid out from its type and shape alone; its bytes are asked of the planner when the writer gets
there, because a planner may make them on request (a cast, say) and all of them at once would not fit. Tensors are
written in row-major order whatever their strides, and only what the item names, not the memory around it.
"""

from __future__ import annotations

import io
import math
import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from reprieve.adapters.dcp.metadata import storage_info
from reprieve.checkpoint.buffers.block_pool import Block
from reprieve.checkpoint.buffers.gc_pause import collection_paused
from reprieve.checkpoint.format.layout import BytesSource, Deferred, FileLayout, Segment, Source, source_of
from reprieve.checkpoint.format.torch_layout import layout_torch
from reprieve.errors import StateError

_ALIGNMENT = 64
"""Items start at such multiples, and so do tensors inside of them: a reader may map them."""

_AROUND_BYTES = 1024
"""What an archive has beside its tensor's bytes, rounded up. Also taken for an item of bytes: most hold one number."""

_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)


@dataclass(frozen=True, slots=True)
class LaidOut:
    """A file of items, and what DCP is to be told about each."""

    layout: FileLayout
    results: list[WriteResult]


def lay_out(name: str, plan: SavePlan, planner: SavePlanner) -> LaidOut:
    """All items of a rank as one file. Nothing of the tensors is copied."""
    with collection_paused():
        file = _File(name)
        for item in plan.items:
            if item.type == WriteItemType.BYTE_IO:
                file.add_bytes(item, _bytes_of(planner.resolve_data(item)))
        for item in plan.items:
            if item.type != WriteItemType.BYTE_IO:
                _add_tensor(file, item, planner)
        return file.build()


def estimated_bytes(plan: SavePlan) -> int:
    """What the plan will take on the disk, as far as can be told before anything is looked at."""
    return sum(_AROUND_BYTES + _chunk_bytes(item) for item in plan.items)


def _chunk_bytes(item: WriteItem) -> int:
    if item.tensor_data is None:
        return 0
    return math.prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize


def _bytes_of(data: Any) -> bytes:
    if not isinstance(data, io.BytesIO):
        raise StateError(f"the planner gave {type(data).__name__} for an item of bytes; it should be io.BytesIO")
    return data.getvalue()


def _add_tensor(file: _File, item: WriteItem, planner: SavePlanner) -> None:
    tensor = _resolve(planner, item)
    if _is_plain(tensor):
        described = item.tensor_data
        as_described = (
            described is not None
            and described.properties.dtype == tensor.dtype
            and tuple(described.chunk.sizes) == tuple(tensor.shape)
        )
        file.add_tensor(item, tensor, _Resolved(planner, item, tensor), findable=as_described)
    else:  # quantised, sparse, a subclass: more than its bytes, and for its own pickling to say what
        stream = io.BytesIO()
        torch.save(tensor.cpu(), stream)
        file.add_bytes(item, stream.getvalue())


def _resolve(planner: SavePlanner, item: WriteItem) -> torch.Tensor:
    tensor = planner.resolve_data(item)
    if not isinstance(tensor, torch.Tensor):
        raise StateError(f"{item.index.fqn}: the planner gave {type(tensor).__name__} for a tensor")
    tensor = tensor.detach()
    if tensor.is_meta:
        raise StateError(f"{item.index.fqn} is on the meta device and has no data to save")
    return tensor


def _gives_views(planner: SavePlanner) -> bool:
    """DCP's own planner looks tensors up (0.1 ms each, so once is enough); another may make them, and then not all of
    them should be in memory together."""
    names = ("resolve_data", "lookup_object", "transform_object")
    return isinstance(planner, DefaultSavePlanner) and all(
        getattr(type(planner), name) is getattr(DefaultSavePlanner, name) for name in names
    )


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and not tensor.is_quantized
    )


class _Resolved:
    """The bytes of one item, from the planner, for as long as they are being copied."""

    __slots__ = ("_found", "_item", "_planner", "_source", "_wanted")

    def __init__(self, planner: SavePlanner, item: WriteItem, like: torch.Tensor) -> None:
        self._planner = planner
        self._item = item
        self._wanted = (like.dtype, like.shape)
        self._found = like if _gives_views(planner) else None
        self._source: Source | None = None

    def copy(self, block: Block, at: int, start: int, stop: int) -> None:
        if self._source is None:
            tensor = self._found if self._found is not None else _resolve(self._planner, self._item)
            if (tensor.dtype, tensor.shape) != self._wanted:
                raise StateError(f"{self._item.index.fqn} changed its type or shape while it was being saved")
            if tensor.device.type not in ("cpu", "cuda"):
                tensor = tensor.cpu()
            if tensor.numel() == 1:
                tensor = tensor.reshape(())  # a single element may have any stride
            self._source = source_of(tensor)
        self._source.copy(block, at, start, stop)
        dtype, shape = self._wanted
        if stop == math.prod(shape) * dtype.itemsize:
            self._source = None


class _File:
    """Appends items one after the other."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._size = 0
        self._crcs = 0
        self._segments: list[Segment | Deferred] = []
        self._pending = bytearray()
        """Bytes that are known, until something else follows them."""
        self._devices: set[torch.device] = set()
        self._results: list[WriteResult] = []
        self._archives: dict[tuple[torch.dtype, torch.Size], _Archive] = {}

    def add_bytes(self, item: WriteItem, data: bytes) -> None:
        self._add_result(item, self._size, len(data))
        self._add_known(data)

    def add_tensor(self, item: WriteItem, like: torch.Tensor, source: Source, *, findable: bool) -> None:
        key = (like.dtype, like.shape)
        if (archive := self._archives.get(key)) is None:
            archive = self._archives[key] = _archive_of(*key)
        self._add_known(bytes(-self._size % _ALIGNMENT))
        self._add_result(item, self._size, archive.size, len(archive.before) if findable else None)
        self._add_known(archive.before)
        number, self._crcs = self._crcs, self._crcs + 1
        if archive.data_bytes:
            self._flush_known()
            self._segments.append(Segment(self._size, archive.data_bytes, source, number))
            self._size += archive.data_bytes
            if like.device.type == "cuda":
                self._devices.add(like.device)
        self._flush_known()
        self._segments.append(
            Deferred(self._size, archive.after_bytes, lambda crcs: archive.after(crcs[number]), number)
        )
        self._size += archive.after_bytes

    def _add_known(self, data: bytes) -> None:
        self._pending += data
        self._size += len(data)

    def _flush_known(self) -> None:
        if self._pending:
            data = bytes(self._pending)
            self._segments.append(Segment(self._size - len(data), len(data), BytesSource(data)))
            self._pending.clear()

    def _add_result(self, item: WriteItem, offset: int, length: int, data_offset: int | None = None) -> None:
        info = storage_info(self._name, offset, length, data_offset)
        self._results.append(WriteResult(item.index, length, info))

    def build(self) -> LaidOut:
        self._flush_known()
        layout = FileLayout(self._name, self._size, self._segments, self._crcs, frozenset(self._devices))
        return LaidOut(layout, self._results)


@dataclass(frozen=True, slots=True)
class _Archive:
    """What `torch.save` would put around a tensor's bytes. The same for all tensors of one type and shape."""

    before: bytes
    data_bytes: int
    after_bytes: int
    rest: Sequence[bytes | Callable[[list[int]], bytes]]

    @property
    def size(self) -> int:
        return len(self.before) + self.data_bytes + self.after_bytes

    def after(self, crc: int) -> bytes:
        return b"".join(part if isinstance(part, bytes) else part([crc]) for part in self.rest)


def _archive_of(dtype: torch.dtype, shape: torch.Size) -> _Archive:
    before, rest = bytearray(), list[bytes | Callable[[list[int]], bytes]]()
    data_bytes = after_bytes = 0
    for segment in layout_torch("an item", _stand_in(dtype, shape)).segments:
        if isinstance(segment, Deferred):
            rest.append(segment.render)
            after_bytes += segment.length
        elif segment.crc >= 0:
            data_bytes = segment.length
        else:
            assert isinstance(segment.source, BytesSource)
            if data_bytes or rest:
                rest.append(segment.source.data)
                after_bytes += segment.length
            else:
                before += segment.source.data
    return _Archive(bytes(before), data_bytes, after_bytes, rest)


def _stand_in(dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
    """A tensor that looks like another one: addresses, with no memory behind them until somebody reads it."""
    size = math.prod(shape) * dtype.itemsize
    if size == 0:
        return torch.empty(shape, dtype=dtype)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(shape)
