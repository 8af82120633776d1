"""Reads and writes `.metadata`: DCP's own record of where each item is, as a pickle.

Stock DCP unpickles whatever it finds. Here only the classes that DCP itself uses are unpickled, by full name, and
paths and offsets are checked before use. It is written as stock writes it, with one addition: `data_offset` on an
item's `_StorageInfo`, which stock preserves and ignores.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta, TensorStorageMetadata

from reprieve.checkpoint.folder.foreign.dcp import METADATA_GLOBALS
from reprieve.errors import InvalidCheckpoint

DATA_OFFSET = "data_offset"
"""Bytes from an item's start to its tensor's bytes, which are contiguous and in row-major order. Reprieve's writer
records it, so that its reader need not open the archive."""


def storage_info(file: str, offset: int, length: int, data_offset: int | None = None) -> _StorageInfo:
    info = _StorageInfo(file, offset, length)
    if data_offset is not None:
        setattr(info, DATA_OFFSET, data_offset)
    return info


def encode(metadata: Metadata, items: Mapping[MetadataIndex, _StorageInfo], meta: StorageMeta) -> bytes:
    metadata.storage_data = dict(items)
    metadata.storage_meta = meta
    if hasattr(filesystem, "CURRENT_DCP_VERSION"):  # torch 2.8 and newer
        metadata.version = filesystem.CURRENT_DCP_VERSION
    return pickle.dumps(metadata)


def decode(data: bytes, *, weights_only: bool) -> Metadata:
    """Raise InvalidCheckpoint for what is not metadata and, with `weights_only`, for what would run other code."""
    try:
        metadata = (_Unpickler if weights_only else pickle.Unpickler)(io.BytesIO(data)).load()
    except InvalidCheckpoint:
        raise
    except Exception as error:  # a hostile or damaged pickle can raise anything
        raise InvalidCheckpoint(f".metadata is damaged or cut short: {error!r}") from error
    if not isinstance(metadata, Metadata) or not isinstance(metadata.state_dict_metadata, dict):
        raise InvalidCheckpoint(".metadata is not the metadata of a DCP checkpoint")
    if not isinstance(metadata.storage_data, dict):
        raise InvalidCheckpoint(".metadata does not say where items are")
    for index, info in metadata.storage_data.items():
        _check_info(index, info)
    return metadata


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if not METADATA_GLOBALS.fullmatch(f"{module}.{name}"):
            raise InvalidCheckpoint(
                f".metadata is refused: loading it would run {module}.{name}. If you trust it, use "
                "StorageReader(…, weights_only=False)"
            )
        return super().find_class(module, name)


def _check_info(index: object, info: object) -> None:
    if not isinstance(index, MetadataIndex) or not isinstance(info, _StorageInfo):
        raise InvalidCheckpoint(".metadata describes storage in a way that this version does not support")
    match vars(info):
        case {"relative_path": str(name), "offset": int(offset), "length": int(length)} if min(offset, length) >= 0:
            path = PurePosixPath(name)
            if path.is_absolute() or ".." in path.parts or "\0" in name or not path.parts:
                raise InvalidCheckpoint(f".metadata names a file outside the checkpoint: {name!r}")
        case _:
            raise InvalidCheckpoint(f".metadata is damaged: {index.fqn!r} has no file, offset or length")


def chunk_shape(metadata: Metadata, index: MetadataIndex) -> tuple[TensorStorageMetadata, tuple[int, ...]]:
    """Return a tensor's description and the shape of its chunk that `index` names."""
    tensor = metadata.state_dict_metadata.get(index.fqn)
    if isinstance(tensor, TensorStorageMetadata):
        hint = index.index
        hinted = [tensor.chunks[hint]] if hint is not None and 0 <= hint < len(tensor.chunks) else []
        for chunk in [*hinted, *tensor.chunks]:
            if index.offset is None or chunk.offsets == index.offset:
                return tensor, tuple(chunk.sizes)
    raise InvalidCheckpoint(f".metadata does not describe {index.fqn!r} at {index.offset}")
