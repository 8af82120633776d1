"""A DCP checkpoint on storage: its folder, its manifest (if Reprieve wrote it), its metadata and its files.

Every rank opens it for itself. All reads are verified: block by block against the manifest or, in a checkpoint of
stock DCP, which has none, item by item against the CRCs in each item's archive.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from reprieve.adapters.dcp import metadata, save_folder
from reprieve.adapters.dcp.item_archive import ItemSlice, PlainTensor, open_item
from reprieve.checkpoint.buffers.block_pool import BLOCK_BYTES, BlockPool
from reprieve.checkpoint.folder.foreign.file_reader import FileReader
from reprieve.checkpoint.folder.foreign.torch_zip import check_archive
from reprieve.checkpoint.format.manifest import SENTINEL, Manifest, read_manifest
from reprieve.checkpoint.io.reader import CheckpointFile, Reader, Target
from reprieve.errors import InvalidCheckpoint

log = logging.getLogger("reprieve")


class SavedCheckpoint:
    """A DCP checkpoint that is open for reading."""

    def __init__(self, path: Path, *, metadata_name: str, weights_only: bool) -> None:
        self.path = path
        self.weights_only = weights_only
        self._folder = save_folder.find_complete(path)
        if self._folder != path:
            log.warning("a crash interrupted the commit of %s: reading %s instead", path, self._folder.name)
        if (self._folder / SENTINEL).exists():
            raise InvalidCheckpoint(f"the save never finished ({SENTINEL} exists)", path=path)
        self._manifest: Manifest | None
        try:
            self._manifest = read_manifest(self._folder)
        except FileNotFoundError:
            self._manifest = None  # stock DCP wrote it
        with self.open(BlockPool(limit=1)) as reader:
            file = self.file(reader, metadata_name)
            data = file.read(0, file.size)
        try:
            self.metadata: Metadata = metadata.decode(data, weights_only=weights_only)
        except InvalidCheckpoint as error:
            raise InvalidCheckpoint(error.reason, path=path) from error

    def open(self, pool: BlockPool) -> Reader:
        size = BLOCK_BYTES if self._manifest is None else self._manifest.block_bytes
        return Reader(self._folder, pool, block_bytes=size)

    def file(self, reader: Reader, name: str) -> CheckpointFile:
        if self._manifest is not None and name not in self._manifest.files:
            raise InvalidCheckpoint(f"{name} is not in the manifest", path=self.path)
        file = reader.open(name, None if self._manifest is None else self._manifest.files[name])
        file.only_targets = True  # other ranks read the other blocks
        return file

    def info(self, index: MetadataIndex) -> _StorageInfo:
        """Return where an item is."""
        info: _StorageInfo | None = (self.metadata.storage_data or {}).get(index)
        if info is None:
            raise InvalidCheckpoint(f".metadata does not say where {index} is", path=self.path)
        return info

    def check(self, index: MetadataIndex, open_file: Callable[[Path], FileReader]) -> None:
        """Raise InvalidCheckpoint unless the item can be read; without a manifest, verify structure and CRCs."""
        info = self.info(index)
        if transforms := getattr(info, "transform_descriptors", None):
            raise self._invalid(index, f"was saved through {transforms}, which only DCP's FileSystemReader can undo")
        if self._manifest is not None:
            return
        start, stop = info.offset, info.offset + info.length
        try:
            file = open_file(self._folder / info.relative_path)
            if stop > file.size:
                raise self._invalid(index, f"ends at byte {stop:,}, the file at {file.size:,}")
            check_archive(file, start, stop, allowed=None)  # whoever unpickles it checks the globals
        except InvalidCheckpoint as error:
            raise error if error.path else self._invalid(index, error.reason) from error
        except OSError as error:
            raise self._invalid(index, f"cannot be read: {error.strerror}") from error

    def tensor(self, reader: Reader, index: MetadataIndex) -> PlainTensor | tuple[torch.Tensor, list[Target]]:
        """Return where the tensor's bytes are; if it is not plain, the tensor and the targets that fill it."""
        info = self.info(index)
        start = getattr(info, metadata.DATA_OFFSET, None)
        if self._manifest is None or type(start) is not int:
            item = ItemSlice(self.file(reader, info.relative_path), index.fqn, info.offset, info.length)
            opened = open_item(item)
            return opened if isinstance(opened, PlainTensor) else (opened, item.targets)
        described, shape = metadata.chunk_shape(self.metadata, index)
        found = PlainTensor(start, described.properties.dtype, shape)
        if not 0 <= start <= start + found.nbytes <= info.length:
            raise self._invalid(index, "is larger than its place in the file")
        return found

    def _invalid(self, index: MetadataIndex, what: str) -> InvalidCheckpoint:
        return InvalidCheckpoint(f"{self.info(index).relative_path}: {index.fqn!r} {what}", path=self.path)
