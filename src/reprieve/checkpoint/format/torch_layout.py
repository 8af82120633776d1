"""Layouts of torch files: what `torch.save` writes and stock `torch.load(weights_only=True)` reads.

A torch file is an uncompressed zip. `archive/data.pkl` is a pickle in which every storage is a persistent id;
`archive/data/<key>` holds a storage's bytes, from a multiple of 64 on, or from a page boundary on if it is large. torch
patches CRCs in afterwards, or leaves them 0. Reprieve streams: each record's CRC follows it in a data descriptor and is
repeated in the directory at the end, which strict zip readers (`python -m zipfile -t`) accept.
"""

from __future__ import annotations

import io
import pickle
import re
import struct
import sys
import zlib
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch

from reprieve.checkpoint.buffers.gc_pause import collection_paused
from reprieve.checkpoint.format.layout import (
    DeviceSource,
    FileLayout,
    HostSource,
    LayoutBuilder,
    Pickled,
    Source,
    alignment_of,
)
from reprieve.checkpoint.format.manifest import ARCHIVE_MARK
from reprieve.checkpoint.format.shards import is_sharded, local_part, whole_bytes
from reprieve.errors import StateError

_ZIP32_MAX = 0xFFFFFFFF
_CRC_FOLLOWS = 1 << 3
_ROOT = "archive/"

ARCHIVE_COMMENT = ARCHIVE_MARK + b"data at the next multiple of 64, from 131072 bytes on of 4096"
"""The zip's comment. It lets a reader compute where each record starts, without visiting the local headers."""


def layout_torch(name: str, obj: object, *, is_shared: bool = False) -> FileLayout:
    """Lay out what `torch.save(obj, name)` would write, without copying tensors.

    `is_shared`: every rank writes a part of the file, so it must not depend on which GPU a rank has.
    """
    with collection_paused():
        pickled = pickle_without_data(name, obj, is_shared=is_shared)
        archive = _Archive(name)
        archive.add_known("data.pkl", pickled.data)
        archive.add_known("byteorder", sys.byteorder.encode())
        for key, storage in enumerate(pickled.storages):
            archive.add_storage(f"data/{key}", storage)
        archive.add_known("version", b"3\n")
        layout = archive.build(pickled)
        layout.is_shared = is_shared
        return layout


def pickle_without_data(name: str, obj: object, *, is_shared: bool = False) -> Pickled:
    """Pickle an object tree, with references in place of its storages."""
    out = io.BytesIO()
    pickler = _StoragePickler(out, is_shared=is_shared)
    try:
        pickler.dump(obj)
    except _MetaTensor as error:
        path = next((path for path, tensor in tensors_in(obj) if tensor is error.tensor), ())
        raise StateError(
            f"{name}: {'.'.join(map(str, path))} is on the meta device and has no data to save: materialize the model "
            "(`to_empty`, then initialize or load it) before the first save"
        ) from None
    except StateError as error:
        raise StateError(f"{name}: {error}") from None
    except (pickle.PicklingError, TypeError, AttributeError, RecursionError) as error:
        raise StateError(f"{name} cannot be saved: {error}") from error
    return Pickled(out.getvalue(), pickler.storages, pickler.used, obj)


class _MetaTensor(Exception):
    """A tensor without data was found."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class _Reference:
    """The place of a storage in the pickle."""

    __slots__ = ("persistent_id",)

    def __init__(self, persistent_id: tuple[Any, ...]) -> None:
        self.persistent_id = persistent_id


KINDS: dict[torch.dtype, Any] = {
    dtype: getattr(torch, name) for dtype, name in torch.storage._dtype_to_storage_type_map().items()
}
"""The storage class that a pickle names for a dtype. Newer dtypes have none and are written as plain bytes."""


_ATOMS = frozenset((int, str, bool, float, type(None), bytes, tuple, list, dict, OrderedDict, torch.Tensor))
"""Types that `persistent_id` need not examine. They are most of a tree, and it is called for every object."""


class _StoragePickler(pickle.Pickler):
    """Pickler that collects storages and writes references to them."""

    def __init__(self, out: io.BytesIO, *, is_shared: bool) -> None:
        super().__init__(out, protocol=2)
        self._is_shared = is_shared
        self.storages: list[Any] = []
        self.used: set[object] = set()
        self._keys: dict[int, tuple[str, Any]] = {}

    def persistent_id(self, obj: Any) -> tuple[Any, ...] | None:
        kind = type(obj)
        if kind in _ATOMS:
            return None
        if kind is _Reference:
            return obj.persistent_id  # type: ignore[no-any-return]
        if kind is torch.storage.TypedStorage:
            return self._refer(obj._untyped_storage, getattr(torch, obj._pickle_storage_type()), obj._size())
        if kind is torch.UntypedStorage:
            return self._refer(obj, torch.UntypedStorage, obj.nbytes())
        if isinstance(obj, type | FunctionType | BuiltinFunctionType):
            self.used.add(obj)
        return None

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor):
            if obj.is_meta:
                raise _MetaTensor(obj)
            if is_sharded(obj):
                # As the whole tensor, since the file holds all of it; the ranks that hold its shards write the bytes.
                return torch._utils._rebuild_tensor_v2, (
                    _Reference(self._refer_to_shards(obj)),
                    0,
                    tuple(obj.shape),
                    _row_major(obj.shape),
                    False,
                    OrderedDict(),
                )
            if _is_plain(obj):
                # The same as the tensor's own __reduce_ex__, five times as fast.
                storage = obj.untyped_storage()
                reference = self._refer(storage, KINDS[obj.dtype], storage.nbytes() // obj.element_size())
                return torch._utils._rebuild_tensor_v2, (
                    _Reference(reference),
                    obj.storage_offset(),
                    tuple(obj.shape),
                    obj.stride(),
                    obj.requires_grad,
                    OrderedDict(),
                )
        elif type(obj) is OrderedDict and not obj and not obj.__dict__:
            return OrderedDict, ()
        return NotImplemented

    def _refer(self, storage: torch.UntypedStorage, kind: Any, count: int) -> tuple[str, Any, str, str, int]:
        # Tensors that share memory share a StorageImpl, so they share memory again after loading.
        identity = storage._cdata
        known = self._keys.get(identity)
        if known is None:
            known = self._keys[identity] = (str(len(self.storages)), kind)
            self.storages.append(storage)
        key, first = known
        if first is not kind:
            raise StateError(
                f"the same memory is held as {first.__name__} and as {kind.__name__}, which the format of torch.save "
                "cannot tell apart: save a clone of one of them"
            )
        return ("storage", kind, key, self._location(storage), count)

    def _refer_to_shards(self, tensor: Any) -> tuple[str, Any, str, str, int]:
        if tensor.dtype not in KINDS:
            raise StateError(f"sharded tensors of {tensor.dtype} cannot be saved")
        # Identified by the object, not by its memory, of which a rank may hold none: all ranks must use the same key.
        known = self._keys.setdefault(id(tensor), (str(len(self.storages)), KINDS[tensor.dtype]))
        if int(known[0]) == len(self.storages):
            self.storages.append(tensor)
        return ("storage", known[1], known[0], self._location(local_part(tensor).untyped_storage()), tensor.numel())

    def _location(self, storage: torch.UntypedStorage) -> str:
        """Return the device tag that tells `torch.load` where to put the storage."""
        tag: str = "cpu" if storage.device.type == "cpu" else torch.serialization.location_tag(storage)
        return re.sub(r":\d+$", ":0", tag) if self._is_shared else tag


def _row_major(shape: torch.Size) -> tuple[int, ...]:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * max(size, 1))
    return tuple(reversed(strides)) if shape else ()


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        type(tensor) is torch.Tensor
        and tensor.dtype in KINDS
        and tensor.layout is torch.strided
        and tensor.device.type in ("cpu", "cuda")
        and not tensor.is_quantized
        and not tensor.is_conj()
        and not tensor.is_neg()
        and not tensor.__dict__
        and tensor.grad_fn is None
        and not tensor._backward_hooks
    )


def tensors_in(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], torch.Tensor]]:
    """Yield the tensors of a tree of containers, each with its path of keys."""
    if isinstance(tree, torch.Tensor):
        yield path, tree
    elif isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from tensors_in(value, (*path, key))
    elif isinstance(tree, list | tuple):
        for number, value in enumerate(tree):
            yield from tensors_in(value, (*path, number))


def data_offset(header_offset: int, name_length: int, size: int) -> int:
    """Return where a record's data starts: after local header, name, ZIP64 sizes (if large) and padding."""
    end = header_offset + 30 + name_length + (20 if size >= _ZIP32_MAX else 0) + 4
    return end + -end % alignment_of(size)


@dataclass(slots=True)
class _Record:
    """One file inside the zip."""

    name: bytes
    offset: int
    size: int
    crc: int
    """The CRC, or its number in the layout if it is not known yet."""
    known: bool

    @property
    def large(self) -> bool:
        return self.size >= _ZIP32_MAX

    @property
    def flags(self) -> int:
        return 0 if self.known else _CRC_FOLLOWS

    @property
    def directory_extra(self) -> bytes:
        numbers = ([self.size, self.size] if self.large else []) + ([self.offset] if self.offset >= _ZIP32_MAX else [])
        return struct.pack(f"<HH{len(numbers)}Q", 1, 8 * len(numbers), *numbers) if numbers else b""


class _Archive:
    """Builder of the zip, record by record."""

    def __init__(self, name: str) -> None:
        self._layout = LayoutBuilder(name)
        self._records: list[_Record] = []

    def add_known(self, name: str, data: bytes) -> None:
        """Append a record whose bytes are known already."""
        self._header(_Record((_ROOT + name).encode(), self._layout.size, len(data), zlib.crc32(data), True))
        self._layout.add_bytes(data)

    def add_storage(self, name: str, storage: Any) -> None:
        """Append a storage, or the whole bytes of a sharded tensor."""
        size = whole_bytes(storage) if is_sharded(storage) else storage.nbytes()
        record = _Record((_ROOT + name).encode(), self._layout.size, size, self._layout.new_crc(), False)
        self._header(record)
        if is_sharded(storage):
            self._layout.add_tensor(name, storage, crc=record.crc)
        else:
            source = _storage_source(storage)
            self._layout.add_source(source, size, crc=record.crc, device=storage.device, label=name)
        sizes = "QQ" if record.large else "II"
        self._layout.add_deferred(
            struct.calcsize("<4sI" + sizes),
            lambda crcs: struct.pack("<4sI" + sizes, b"PK\x07\x08", crcs[record.crc], size, size),
            needs=record.crc,
        )

    def _header(self, record: _Record) -> None:
        """Append the record's local header, padded so that its data starts aligned."""
        size = min(record.size, _ZIP32_MAX)
        zip64 = struct.pack("<HHQQ", 1, 16, record.size, record.size) if record.large else b""
        start = data_offset(record.offset, len(record.name), record.size)
        padding = start - (record.offset + 30 + len(record.name) + len(zip64) + 4)
        extra = zip64 + struct.pack("<2sH", b"FB", padding) + b"Z" * padding
        crc = record.crc if record.known else 0
        header = struct.pack(
            "<4s5H3I2H",
            b"PK\x03\x04",
            45 if record.large else 20,
            record.flags,
            0,
            0,
            _DOS_DATE,
            crc,
            size,
            size,
            len(record.name),
            len(extra),
        )
        self._layout.add_bytes(header + record.name + extra)
        self._records.append(record)

    def _directory(self, crcs: list[int]) -> bytes:
        parts = []
        for record in self._records:
            size = min(record.size, _ZIP32_MAX)
            extra = record.directory_extra
            parts += [
                struct.pack(
                    "<4s6H3I5H2I",
                    b"PK\x01\x02",
                    45,
                    45 if extra else 20,
                    record.flags,
                    0,
                    0,
                    _DOS_DATE,
                    record.crc if record.known else crcs[record.crc],
                    size,
                    size,
                    len(record.name),
                    len(extra),
                    0,
                    0,
                    0,
                    0,
                    min(record.offset, _ZIP32_MAX),
                ),
                record.name,
                extra,
            ]
        return b"".join(parts)

    def build(self, pickled: Pickled) -> FileLayout:
        start = self._layout.size
        length = sum(46 + len(record.name) + len(record.directory_extra) for record in self._records)
        self._layout.add_deferred(length, self._directory, needs=None)
        count, end = len(self._records), start + length
        if count >= 0xFFFF or end >= _ZIP32_MAX:
            self._layout.add_bytes(
                struct.pack("<4sQ2H2I4Q", b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, length, start)
                + struct.pack("<4sIQI", b"PK\x06\x07", 0, end, 1)
            )
        short = min(count, 0xFFFF)
        self._layout.add_bytes(
            struct.pack(
                "<4s4H2IH",
                b"PK\x05\x06",
                0,
                0,
                short,
                short,
                min(length, _ZIP32_MAX),
                min(start, _ZIP32_MAX),
                len(ARCHIVE_COMMENT),
            )
            + ARCHIVE_COMMENT
        )
        return self._layout.build(pickled)


_DOS_DATE = (1 << 5) | 1  # 1980-01-01, the first day of the zip format: the same state gives the same bytes


def _storage_source(storage: torch.UntypedStorage) -> Source:
    if storage.device.type == "cpu":
        return HostSource(storage.data_ptr(), storage)
    flat = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return DeviceSource(flat.set_(storage))
