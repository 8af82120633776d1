"""`StorageReader`: the storage that `dcp.load` reads through.

DCP's plan names the box of each saved chunk that this rank needs, and where it goes. `load_pass.py` reads it from the
files of a `SavedCheckpoint`. DCP gathers errors between the steps and raises any rank's error on all of them.
"""

from __future__ import annotations

import os
import uuid
from typing import Any

from torch.distributed.checkpoint import storage
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from reprieve.adapters.dcp.load_pass import LoadPass
from reprieve.adapters.dcp.save_folder import METADATA
from reprieve.adapters.dcp.saved_checkpoint import SavedCheckpoint
from reprieve.adapters.dcp.writer import is_local, resolve_folder
from reprieve.errors import CheckpointError, InvalidCheckpoint

_MAX_BUFFERED_BYTES = 2**30
"""Bytes of buffers that are filled before they are copied on and freed. Loads into live tensors need none."""


class StorageReader(storage.StorageReader):
    """A reader of DCP checkpoints, Reprieve's or stock, that uses no byte before it is checked.

    A damaged block makes `dcp.load` raise on all ranks. The error of the rank that found it is an `InvalidCheckpoint`
    that names the file and the block. The contents of the tensors are undefined then.
    """

    def __init__(self, path: str | os.PathLike[str], *, weights_only: bool = True) -> None:
        """
        path: the checkpoint's folder. `checkpoint_id` of `dcp.load` overrides it.
        weights_only: refuse to unpickle what would run code. Stock DCP unpickles `.metadata` and everything that is
            not a tensor without a check. Set it to False if you trust the checkpoint; to allow single types, use
            torch.serialization.add_safe_globals.
        """
        super().__init__()
        self.path = resolve_folder(path)
        self.weights_only = weights_only
        self._load_id = str(uuid.uuid4())
        self._checkpoint: SavedCheckpoint | None = None

    # What DCP calls

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id:
            self.path = resolve_folder(checkpoint_id)
        self._load_id = str(uuid.uuid4())

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read `.metadata`. DCP passes `rank` after an error, to try that rank's own metadata."""
        rank = kwargs.get("rank")
        try:
            return self._read_metadata(METADATA if rank is None else f"__{rank}{METADATA}")
        except InvalidCheckpoint:
            if rank is None:
                raise
            try:
                return self._read_metadata(METADATA)
            except InvalidCheckpoint as error:
                # DCP would turn an error from here into an AssertionError.
                return _Unreadable(error)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if isinstance(metadata, _Unreadable):
            raise metadata.error

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        if (checkpoint := self._checkpoint) is None:
            raise CheckpointError("read_data was called before read_metadata")

        def file_and_offset(item: ReadItem) -> tuple[str, int]:
            info = checkpoint.info(item.storage_index)
            return info.relative_path, info.offset

        # In the order of the files, so that several passes read few blocks twice.
        items = sorted(plan.items, key=file_and_offset, reverse=True)
        while items:
            with LoadPass(checkpoint, planner) as load_pass:
                while items and load_pass.buffered_bytes < _MAX_BUFFERED_BYTES:
                    load_pass.add(items.pop())
                load_pass.run()
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @property
    def checkpoint_id(self) -> str:
        return str(self.path)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return is_local(checkpoint_id)

    def _read_metadata(self, name: str) -> Metadata:
        self._checkpoint = SavedCheckpoint(self.path, metadata_name=name, weights_only=self.weights_only)
        metadata = self._checkpoint.metadata
        if getattr(metadata, "storage_meta", None) is None:
            metadata.storage_meta = StorageMeta()
        assert metadata.storage_meta is not None
        metadata.storage_meta.load_id = self._load_id
        return metadata


class _Unreadable(Metadata):
    """Metadata that carries an error past the point where DCP would hide it."""

    def __init__(self, error: InvalidCheckpoint) -> None:
        super().__init__({})
        self.error = error
