"""Reads a torch file through the verifying reader: storages go straight into memory, the pickle runs no code."""

from __future__ import annotations

import io
import zipfile
from typing import Any

import torch

from reprieve.checkpoint.format.torch_layout import ARCHIVE_COMMENT, data_offset
from reprieve.checkpoint.format.torch_unpickle import Storages, unpickle
from reprieve.checkpoint.io.destinations import destination_of
from reprieve.checkpoint.io.reader import CheckpointFile, Target
from reprieve.errors import UnsafeState


class TorchFile:
    """A torch file in a checkpoint: its pickle, and the place of each storage's bytes."""

    def __init__(self, file: CheckpointFile) -> None:
        self.file = file
        try:
            with zipfile.ZipFile(_Window(file)) as archive:
                self._is_reprieve_file = archive.comment == ARCHIVE_COMMENT
                self._records = {info.filename.split("/", 1)[-1]: info for info in archive.infolist()}
        except (zipfile.BadZipFile, ValueError, NotImplementedError) as error:
            raise file.bad(f"is not a torch file: {error}") from error
        self.pickled = file.read(*self.range("data.pkl"))

    def range(self, name: str) -> tuple[int, int]:
        """The range [start, stop) of a record's data in the file."""
        info = self._records.get(name)
        if info is None:
            raise self.file.bad(f"has no record {name}")
        if info.compress_type != zipfile.ZIP_STORED:
            raise self.file.bad(f"has a compressed record {name}")
        if self._is_reprieve_file:
            start = data_offset(info.header_offset, len(info.filename.encode()), info.file_size)
        else:
            header = self.file.read(info.header_offset, info.header_offset + 30)
            start = info.header_offset + 30 + int.from_bytes(header[26:28], "little")
            start += int.from_bytes(header[28:30], "little")
        if start + info.file_size > self.file.size:
            raise self.file.bad(f"ends before its record {name} does")
        return start, start + info.file_size

    def load(self, storages: Storages, sparse: list[torch.Tensor] | None = None) -> Any:
        """The object tree. Sparse tensors in it are added to `sparse`, for `validate`."""
        try:
            return unpickle(self.file.name, self.pickled, storages, sparse)
        except UnsafeState as error:
            raise self.file.bad(f"is refused: {error}") from error

    def validate(self, sparse: list[torch.Tensor]) -> None:
        """Check sparse tensors once their storages are filled: bad indices could read memory of other objects."""
        torch._utils._sparse_tensors_to_validate.extend(sparse)
        try:
            with torch.sparse.check_sparse_tensor_invariants():
                torch._utils._validate_loaded_sparse_tensors()
        except RuntimeError as error:
            raise self.file.bad(f"has an impossible sparse tensor: {error}") from error

    def read_into(self, key: str, storage: torch.UntypedStorage) -> None:
        """Have the reader fill the storage with the bytes of record `key`."""
        start, stop = self.range(f"data/{key}")
        if stop - start != storage.nbytes():
            raise self.file.bad(f"has {stop - start} bytes for storage {key}; its pickle says {storage.nbytes()}")
        if stop > start:
            self.file.targets.append(Target(start, stop - start, destination_of(storage)))


class _Window(io.RawIOBase):
    """A file object over verified reads, for `zipfile`."""

    def __init__(self, file: CheckpointFile) -> None:
        self._file = file
        self._at = 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._file.size}[whence]
        if base + offset < 0:
            raise ValueError("seek before the start of the file")
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        stop = self._file.size if size is None or size < 0 else min(self._at + size, self._file.size)
        data = self._file.read(min(self._at, stop), stop)
        self._at = max(self._at, stop)
        return data
