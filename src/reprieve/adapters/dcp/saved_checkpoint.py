"""A DCP checkpoint on storage: where it is, its manifest (if ours), its metadata, and its files through the reader.

Every rank opens it for itself. What is read from it was checked: against the manifest block by block, or, in a
checkpoint of stock DCP, which has none, item by item against the CRCs that each item carries.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from reprieve.adapters.dcp import metadata, save_folder
from reprieve.adapters.dcp.item_archive import PlainTensor, Slice, open_item
from reprieve.checkpoint.buffers.block_pool import BLOCK_BYTES, BlockPool
from reprieve.checkpoint.folder.foreign.file_reader import FileReader
from reprieve.checkpoint.folder.foreign.torch_zip import check_archive
from reprieve.checkpoint.format.manifest import SENTINEL, Manifest, read_manifest
from reprieve.checkpoint.io.reader import CheckpointFile, Reader, Target
from reprieve.errors import InvalidCheckpoint

log = logging.getLogger("reprieve")


class SavedCheckpoint:
    """One checkpoint."""

    def __init__(self, path: Path, *, metadata_name: str, weights_only: bool) -> None:
        self.path = path
        self.weights_only = weights_only
        self._folder = save_folder.whole_at(path)
        if self._folder != path:
            log.warning("%s is not there after a crash in a commit: %s is read instead", path, self._folder.name)
        if (self._folder / SENTINEL).exists():
            raise InvalidCheckpoint(f"the save never finished ({SENTINEL} is there)", path=path)
        self._manifest: Manifest | None
        try:
            self._manifest = read_manifest(self._folder)
        except FileNotFoundError:
            self._manifest = None  # of stock DCP
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
        file.only_targets = True  # the other blocks belong to other ranks
        return file

    def info(self, index: MetadataIndex) -> _StorageInfo:
        """Where an item is."""
        info: _StorageInfo | None = (self.metadata.storage_data or {}).get(index)
        if info is None:
            raise InvalidCheckpoint(f".metadata does not say where {index} is", path=self.path)
        return info

    def check(self, index: MetadataIndex, open_file: Callable[[Path], FileReader]) -> None:
        """In a checkpoint without a manifest: the item's structure and its CRCs, before anything of it is used."""
        info = self.info(index)
        if transforms := getattr(info, "transform_descriptors", None):
            raise self._bad(
                index, f"went through {transforms} when it was saved, which only DCP's FileSystemReader can undo"
            )
        if self._manifest is not None:
            return
        start, stop = info.offset, info.offset + info.length
        try:
            file = open_file(self._folder / info.relative_path)
            if stop > file.size:
                raise self._bad(index, f"ends at byte {stop:,}, the file at {file.size:,}")
            check_archive(file, start, stop, allowed=None)  # what it may name is for whoever unpickles it to say
        except InvalidCheckpoint as error:
            raise error if error.path else self._bad(index, error.reason) from error
        except OSError as error:
            raise self._bad(index, f"cannot be read: {error.strerror}") from error

    def tensor(self, reader: Reader, index: MetadataIndex) -> PlainTensor | tuple[torch.Tensor, list[Target]]:
        """Where the tensor's bytes are; or, if it is more than its bytes, the tensor, and what will fill it."""
        info = self.info(index)
        start = getattr(info, metadata.DATA_OFFSET, None)
        if self._manifest is None or type(start) is not int:
            piece = Slice(self.file(reader, info.relative_path), index.fqn, info.offset, info.length)
            opened = open_item(piece)
            return opened if isinstance(opened, PlainTensor) else (opened, piece.targets)
        described, shape = metadata.chunk_shape(self.metadata, index)
        found = PlainTensor(start, described.properties.dtype, shape)
        if not 0 <= start <= start + found.nbytes <= info.length:
            raise self._bad(index, "does not fit its place")
        return found

    def _bad(self, index: MetadataIndex, what: str) -> InvalidCheckpoint:
        return InvalidCheckpoint(f"{self.info(index).relative_path}: {index.fqn!r} {what}", path=self.path)
