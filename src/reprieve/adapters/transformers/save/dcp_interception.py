"""Intercepts what accelerate saves through DCP (FSDP with SHARDED_STATE_DICT), like the other files of a checkpoint.

DCP plans and coordinates the ranks as usual. Instead of writing, each rank hands its items to the engine as one file
layout. `interception.py` puts `InterceptingWriter` in the place of DCP's FileSystemWriter during a save.
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
from reprieve.adapters.dcp.item_layout import layout_items
from reprieve.checkpoint.format.layout import FileLayout, bytes_layout


class InterceptingWriter(storage.StorageWriter):
    """A replacement for DCP's FileSystemWriter that passes file layouts to `add_layout`."""

    def __init__(self, name: str, add_layout: Callable[[FileLayout], None]) -> None:
        """`name`: the folder, relative to the checkpoint."""
        super().__init__()
        self._name = name
        self._add_layout = add_layout

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return [dataclasses.replace(plan, storage_data=f"__{rank}_0.distcp") for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        item_file = layout_items(plan.storage_data, plan, planner)
        if plan.items:
            self._add_layout(dataclasses.replace(item_file.layout, name=f"{self._name}/{plan.storage_data}"))
        future: Future[list[WriteResult]] = Future()
        future.set_result(item_file.results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        items = {result.index: result.storage_data for rank_results in results for result in rank_results}
        meta = StorageMeta(checkpoint_id=self._name, save_id=str(uuid.uuid4()))
        self._add_layout(bytes_layout(f"{self._name}/.metadata", metadata_file.encode(metadata, items, meta)))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True
