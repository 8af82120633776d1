"""What accelerate saves through DCP (FSDP with SHARDED_STATE_DICT), collected like the other files of a checkpoint.

DCP plans and agrees as ever; only the writing is left to the engine, which has each rank's items as one layout.
"""

from __future__ import annotations

import dataclasses
import os
import uuid
from collections.abc import Callable
from typing import Any

from torch.distributed.checkpoint import storage
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from reprieve.adapters.dcp import metadata as metadata_file
from reprieve.adapters.dcp.item_layout import lay_out
from reprieve.checkpoint.format.layout import FileLayout, bytes_layout


class InterceptingWriter(storage.StorageWriter):
    """In place of DCP's FileSystemWriter. `name`: the folder, as the checkpoint calls it."""

    def __init__(self, name: str, take: Callable[[FileLayout], None]) -> None:
        super().__init__()
        self._name = name
        self._take = take

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return [dataclasses.replace(plan, storage_data=f"__{rank}_0.distcp") for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        laid_out = lay_out(plan.storage_data, plan, planner)
        if plan.items:
            self._take(dataclasses.replace(laid_out.layout, name=f"{self._name}/{plan.storage_data}"))
        future: Future[list[WriteResult]] = Future()
        future.set_result(laid_out.results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        items = {result.index: result.storage_data for of_rank in results for result in of_rank}
        meta = StorageMeta(checkpoint_id=self._name, save_id=str(uuid.uuid4()))
        self._take(bytes_layout(f"{self._name}/.metadata", metadata_file.encode(metadata, items, meta)))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True
