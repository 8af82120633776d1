"""`StorageReader`: what `dcp.load` reads through.

DCP's plan says which box of which saved piece this rank wants, and where it goes; `loading` reads it, `saved` is where
from. DCP gathers errors between the steps and raises any rank's on all of them.
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
from reprieve.adapters.dcp.writer import is_local, located
from reprieve.errors import CheckpointError, InvalidCheckpoint

_HELD_BYTES = 2**30
"""Memory in between that is filled before it is copied on and freed. Loads into live tensors need none."""


class StorageReader(storage.StorageReader):
    """Reads a DCP checkpoint, ours or stock, and uses no byte that was not checked.

    A damaged block makes `dcp.load` raise on all ranks; the failure of the rank that met it is an `InvalidCheckpoint`
    that names the file and the block. Tensors may then hold anything.
    """

    def __init__(self, path: str | os.PathLike[str], *, weights_only: bool = True) -> None:
        """
        path: the checkpoint's folder. `checkpoint_id` of `dcp.load` takes its place.
        weights_only: refuse what would run code of its own when loaded. DCP itself unpickles `.metadata` and everything
            that is not a tensor without a check. False if you trust whoever wrote the checkpoint; to allow single
            types, use torch.serialization.add_safe_globals.
        """
        super().__init__()
        self.path = located(path)
        self.weights_only = weights_only
        self._load_id = str(uuid.uuid4())
        self._saved: SavedCheckpoint | None = None

    # What DCP calls

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id:
            self.path = located(checkpoint_id)
        self._load_id = str(uuid.uuid4())

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Where `rank` is given, DCP has met an error here and asks for that rank's own metadata."""
        rank = kwargs.get("rank")
        try:
            return self._read_metadata(METADATA if rank is None else f"__{rank}{METADATA}")
        except InvalidCheckpoint:
            if rank is None:
                raise
            try:
                return self._read_metadata(METADATA)
            except InvalidCheckpoint as error:
                # Raised from here, DCP would make an AssertionError of it.
                return _Unreadable(error)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if isinstance(metadata, _Unreadable):
            raise metadata.error

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        if (saved := self._saved) is None:
            raise CheckpointError("read_data was called before read_metadata")

        def place(item: ReadItem) -> tuple[str, int]:
            info = saved.info(item.storage_index)
            return info.relative_path, info.offset

        # In the order of the files, so that several passes read hardly any block twice.
        items = sorted(plan.items, key=place, reverse=True)
        while items:
            with LoadPass(saved, planner) as loading:
                while items and loading.held < _HELD_BYTES:
                    loading.add(items.pop())
                loading.run()
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
        self._saved = SavedCheckpoint(self.path, metadata_name=name, weights_only=self.weights_only)
        metadata = self._saved.metadata
        if getattr(metadata, "storage_meta", None) is None:
            metadata.storage_meta = StorageMeta()
        assert metadata.storage_meta is not None
        metadata.storage_meta.load_id = self._load_id
        return metadata


class _Unreadable(Metadata):
    """Carries an error past the one place where DCP would swallow it."""

    def __init__(self, error: InvalidCheckpoint) -> None:
        super().__init__({})
        self.error = error
