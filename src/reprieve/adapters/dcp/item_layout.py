"""Lays out the items of a save plan as one file: each is a whole `torch.save` archive, as in a stock `.distcp` file.

The layout of an item follows from its dtype and shape alone. The writer gets the bytes from the planner only when it
reaches them, because a planner may make them on request (a cast, for example) and all of them may not fit in memory.
Tensors are written in row-major order whatever their strides, and without the rest of their storage.
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
"""Items, and tensors inside them, start at multiples of this, so that a reader can map them."""

_ARCHIVE_OVERHEAD_BYTES = 1024
"""Bytes in an archive besides its tensor's, rounded up. Also the estimate for an item of bytes: most are a number."""

_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)


@dataclass(frozen=True, slots=True)
class ItemFile:
    """A file of items, and the result of each for DCP."""

    layout: FileLayout
    results: list[WriteResult]


def layout_items(name: str, plan: SavePlan, planner: SavePlanner) -> ItemFile:
    """Lay out all items of a rank as one file. No tensor is copied."""
    with collection_paused():
        file = _ItemFileBuilder(name)
        for item in plan.items:
            if item.type == WriteItemType.BYTE_IO:
                file.add_bytes(item, _bytes_of(planner.resolve_data(item)))
        for item in plan.items:
            if item.type != WriteItemType.BYTE_IO:
                _add_tensor(file, item, planner)
        return file.build()


def estimated_bytes(plan: SavePlan) -> int:
    """Estimate how many bytes the plan takes on disk, without resolving its items."""
    return sum(_ARCHIVE_OVERHEAD_BYTES + _chunk_bytes(item) for item in plan.items)


def _chunk_bytes(item: WriteItem) -> int:
    if item.tensor_data is None:
        return 0
    return math.prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize


def _bytes_of(data: Any) -> bytes:
    if not isinstance(data, io.BytesIO):
        raise StateError(f"the planner returned {type(data).__name__} for an item of bytes; it should be io.BytesIO")
    return data.getvalue()


def _add_tensor(file: _ItemFileBuilder, item: WriteItem, planner: SavePlanner) -> None:
    tensor = _resolve(planner, item)
    if _is_plain(tensor):
        planned = item.tensor_data
        is_as_planned = (
            planned is not None
            and planned.properties.dtype == tensor.dtype
            and tuple(planned.chunk.sizes) == tuple(tensor.shape)
        )
        file.add_tensor(item, tensor, _PlannedSource(planner, item, tensor), record_offset=is_as_planned)
    else:  # quantized, sparse or a subclass: its own pickling saves more than its bytes
        stream = io.BytesIO()
        torch.save(tensor.cpu(), stream)
        file.add_bytes(item, stream.getvalue())


def _resolve(planner: SavePlanner, item: WriteItem) -> torch.Tensor:
    tensor = planner.resolve_data(item)
    if not isinstance(tensor, torch.Tensor):
        raise StateError(f"{item.index.fqn}: the planner returned {type(tensor).__name__} for a tensor")
    tensor = tensor.detach()
    if tensor.is_meta:
        raise StateError(f"{item.index.fqn} is on the meta device and has no data to save")
    return tensor


def _returns_views(planner: SavePlanner) -> bool:
    """Whether the planner returns views of live tensors, as DCP's own does.

    These can be held: a lookup takes 0.1 ms. Another planner may make tensors, which must not all be in memory at once.
    """
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


class _PlannedSource:
    """The bytes of one item, resolved by the planner and held only while they are copied."""

    __slots__ = ("_expected", "_item", "_planner", "_source", "_view")

    def __init__(self, planner: SavePlanner, item: WriteItem, like: torch.Tensor) -> None:
        self._planner = planner
        self._item = item
        self._expected = (like.dtype, like.shape)
        self._view = like if _returns_views(planner) else None
        self._source: Source | None = None

    def copy(self, block: Block, at: int, start: int, stop: int) -> None:
        if self._source is None:
            tensor = self._view if self._view is not None else _resolve(self._planner, self._item)
            if (tensor.dtype, tensor.shape) != self._expected:
                raise StateError(f"{self._item.index.fqn} changed its dtype or shape while it was being saved")
            if tensor.device.type not in ("cpu", "cuda"):
                tensor = tensor.cpu()
            if tensor.numel() == 1:
                tensor = tensor.reshape(())  # a single element may have any stride
            self._source = source_of(tensor)
        self._source.copy(block, at, start, stop)
        dtype, shape = self._expected
        if stop == math.prod(shape) * dtype.itemsize:
            self._source = None


class _ItemFileBuilder:
    """Builds an `ItemFile` from items, one after the other."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._size = 0
        self._crc_count = 0
        self._segments: list[Segment | Deferred] = []
        self._pending = bytearray()
        """Known bytes at the end of the file, not yet a segment."""
        self._devices: set[torch.device] = set()
        self._results: list[WriteResult] = []
        self._templates: dict[tuple[torch.dtype, torch.Size], _ArchiveTemplate] = {}

    def add_bytes(self, item: WriteItem, data: bytes) -> None:
        self._add_result(item, self._size, len(data))
        self._add_known(data)

    def add_tensor(self, item: WriteItem, like: torch.Tensor, source: Source, *, record_offset: bool) -> None:
        key = (like.dtype, like.shape)
        if (archive := self._templates.get(key)) is None:
            archive = self._templates[key] = _archive_template(*key)
        self._add_known(bytes(-self._size % _ALIGNMENT))
        self._add_result(item, self._size, archive.size, len(archive.before) if record_offset else None)
        self._add_known(archive.before)
        number, self._crc_count = self._crc_count, self._crc_count + 1
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

    def build(self) -> ItemFile:
        self._flush_known()
        layout = FileLayout(self._name, self._size, self._segments, self._crc_count, frozenset(self._devices))
        return ItemFile(layout, self._results)


@dataclass(frozen=True, slots=True)
class _ArchiveTemplate:
    """What `torch.save` writes around a tensor's bytes. It is the same for all tensors of a dtype and shape."""

    before: bytes
    data_bytes: int
    after_bytes: int
    after_parts: Sequence[bytes | Callable[[list[int]], bytes]]

    @property
    def size(self) -> int:
        return len(self.before) + self.data_bytes + self.after_bytes

    def after(self, crc: int) -> bytes:
        return b"".join(part if isinstance(part, bytes) else part([crc]) for part in self.after_parts)


def _archive_template(dtype: torch.dtype, shape: torch.Size) -> _ArchiveTemplate:
    before, after_parts = bytearray(), list[bytes | Callable[[list[int]], bytes]]()
    data_bytes = after_bytes = 0
    for segment in layout_torch("an item", _placeholder(dtype, shape)).segments:
        if isinstance(segment, Deferred):
            after_parts.append(segment.render)
            after_bytes += segment.length
        elif segment.crc >= 0:
            data_bytes = segment.length
        else:
            assert isinstance(segment.source, BytesSource)
            if data_bytes or after_parts:
                after_parts.append(segment.source.data)
                after_bytes += segment.length
            else:
                before += segment.source.data
    return _ArchiveTemplate(bytes(before), data_bytes, after_bytes, after_parts)


def _placeholder(dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
    """Make a tensor of this dtype and shape in address space alone: reading it would allocate the memory."""
    size = math.prod(shape) * dtype.itemsize
    if size == 0:
        return torch.empty(shape, dtype=dtype)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(shape)
