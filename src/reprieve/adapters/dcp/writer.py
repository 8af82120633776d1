"""`StorageWriter`: the storage that `dcp.save` and `dcp.async_save` write through.

DCP calls, in this order: prepare_local_plan (all ranks) → prepare_global_plan (coordinator) → write_data (all ranks) →
finish (coordinator). Between the steps, DCP gathers the ranks' results and errors and raises any rank's error on all of
them, so nothing here waits for another rank. The files of a rank and their checksums reach the coordinator as one more
result in the rank's list. They go into the manifest, not into `.metadata`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import itertools
import os
import platform
import re
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import storage
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from reprieve._version import __version__
from reprieve.adapters.dcp import metadata as metadata_file
from reprieve.adapters.dcp import save_folder
from reprieve.adapters.dcp.item_layout import estimated_bytes, layout_items
from reprieve.checkpoint.buffers.block_pool import BLOCK_BYTES, BlockPool
from reprieve.checkpoint.format.checksum import digest_of
from reprieve.checkpoint.format.manifest import FileEntry, Manifest
from reprieve.checkpoint.io.writer import Writer
from reprieve.errors import CheckpointError, ConfigError, Fenced, StorageFull
from reprieve.storage.disk import Disk, explain, free_bytes
from reprieve.storage.uri import local_path
from reprieve.units import format_size


@dataclass(frozen=True, slots=True)
class _RankPlan:
    """What a rank's plan carries: the prefix of its files."""

    prefix: str


@dataclass(frozen=True, slots=True)
class _RankFiles:
    """What a rank reports to the coordinator: the files that it wrote."""

    save_id: str
    files: Mapping[str, FileEntry]


class StorageWriter(storage.StorageWriter):
    """A writer of DCP checkpoints that become visible only when they are complete, durable and checksummed.

    The files are stock DCP's. If a rank fails, `dcp.save` raises on all ranks, nothing new is visible, and what was at
    `path` before is still there.
    """

    def __init__(self, path: str | os.PathLike[str], *, overwrite: bool = True, disk: Disk | None = None) -> None:
        """
        path: the checkpoint's folder, on storage that all ranks share. `checkpoint_id` of `dcp.save` overrides it.
        overwrite: replace an existing checkpoint once the new one is complete. False: raise CheckpointError instead.
        disk: for tests.
        """
        super().__init__()
        self.path = resolve_folder(path)
        self.overwrite = overwrite
        self._disk = disk or Disk()
        self._save_id = str(uuid.uuid4())

    # What DCP calls

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id:
            self.path = resolve_folder(checkpoint_id)
        self._save_id = str(uuid.uuid4())

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if not kwargs.get("use_collectives", True):
            raise ConfigError(
                "use_collectives=False: without collectives, no rank knows when a checkpoint is complete. Remove it, "
                "or use DCP's own FileSystemWriter"
            )

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Check the folder and the free space, then make the folder. No rank writes before this."""
        self._save_id = str(uuid.uuid4())
        with self._errors_explained():
            if not self.overwrite and (self.path / save_folder.METADATA).exists():
                raise CheckpointError(f"{self.path} exists already, and overwrite=False")
            if self.path.exists() and not self.path.is_dir():
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(self.path))
            self._check_space(sum(estimated_bytes(plan) for plan in plans))
            save_folder.begin(self._disk, self.path, self._save_id)
        # A planner that caches plans sends other ones to the ranks: only the prefix may be in here.
        return [dataclasses.replace(plan, storage_data=_RankPlan(f"__{rank}_")) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's items as one file. It is durable on return."""
        folder = save_folder.saving_folder(self.path)
        save_id = save_folder.join(folder)
        with self._abandoned_on_error(folder, save_id) as needed:
            part: _RankPlan = plan.storage_data
            item_file = layout_items(f"{part.prefix}0{save_folder.DATA_SUFFIX}", plan, planner)
            needed.append(item_file.layout.size)
            layouts = [item_file.layout] if plan.items else []
            pool = _block_pool(os.getpid(), bool(item_file.layout.devices))
            files = Writer(self._disk, pool, folder, layouts).write_through()
        written = WriteResult(MetadataIndex("reprieve"), 0, _RankFiles(save_id, files))
        future: Future[list[WriteResult]] = Future()
        future.set_result([*item_file.results, written])
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Make the checkpoint visible, now that all ranks have written."""
        folder = save_folder.saving_folder(self.path)
        with self._abandoned_on_error(folder, self._save_id):
            items: dict[MetadataIndex, Any] = {}
            files: dict[str, FileEntry] = {}
            for result in itertools.chain.from_iterable(results):
                if not isinstance(result.storage_data, _RankFiles):
                    items[result.index] = result.storage_data
                elif result.storage_data.save_id == self._save_id:
                    files |= result.storage_data.files
                else:
                    raise Fenced(f"another save to {self.path} has taken over: this one is discarded")
            data = metadata_file.encode(metadata, items, self.storage_meta())
            self._disk.write_file(folder / save_folder.METADATA, data)
            files[save_folder.METADATA] = _file_entry(data)
            manifest = _manifest(self.path, metadata, files, world_size=len(results))
            save_folder.publish(self._disk, self.path, manifest, self._save_id)

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(checkpoint_id=str(self.path), save_id=self._save_id)

    @property
    def checkpoint_id(self) -> str:
        return str(self.path)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return is_local(checkpoint_id)

    # Errors

    def _check_space(self, needed: int) -> None:
        existing = self.path
        while not existing.is_dir():
            existing = existing.parent
        if needed > (free := free_bytes(existing)):
            raise _storage_full(self.path, needed, free)

    @contextlib.contextmanager
    def _abandoned_on_error(self, folder: Path, save_id: str) -> Iterator[list[int]]:
        """Abandon the save if the block fails. The block appends the bytes that it needs, for the message."""
        needed: list[int] = []
        with self._errors_explained(needed):
            try:
                yield needed
            except BaseException:
                save_folder.abandon(self._disk, folder, save_id)
                raise

    @contextlib.contextmanager
    def _errors_explained(self, needed: list[int] | None = None) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:
            if needed is not None and not save_folder.saving_folder(self.path).exists():
                raise CheckpointError(f"another rank abandoned the save to {self.path}") from error
            explain(error, self.path)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT) and not isinstance(error, StorageFull):
                raise _storage_full(self.path, sum(needed or []), free_bytes(self.path.parent)) from error
            explain(error, self.path)


def resolve_folder(path: str | os.PathLike[str]) -> Path:
    """Return the folder that `path` names. A link is followed: a save replaces what it points to, not the link."""
    found = local_path(path)
    return found.resolve() if found.is_symlink() else found


def is_local(checkpoint_id: str | os.PathLike[str]) -> bool:
    try:
        local_path(checkpoint_id)
    except ConfigError:
        return False
    return True


@functools.cache
def _block_pool(_pid: int, pinned: bool) -> BlockPool:
    """Return the block pool of this process. Scripts make a StorageWriter for each save, and pools are expensive.

    Memory is pinned only to read from a GPU: the process of an asynchronous save should not initialize CUDA.
    """
    return BlockPool(pinned=pinned)


def _storage_full(path: Path, needed: int, free: int) -> StorageFull:
    return StorageFull(
        errno.ENOSPC,
        f"not enough space for {path}: {format_size(needed)} needed, {format_size(free)} free. Free some space",
    )


def _file_entry(data: bytes) -> FileEntry:
    blocks = [digest_of(data[start : start + BLOCK_BYTES]) for start in range(0, len(data), BLOCK_BYTES)]
    return FileEntry.of(len(data), blocks)


def _manifest(path: Path, metadata: Metadata, files: Mapping[str, FileEntry], *, world_size: int) -> Manifest:
    # DCP knows neither runs nor steps. The step is usually part of the folder's name.
    numbers = re.findall(r"\d+", path.name)
    return Manifest(
        step=int(numbers[-1]) if numbers else 0,
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        run=os.environ.get("REPRIEVE_RUN") or "dcp",
        attempt=0,
        world_size=world_size,
        versions={"reprieve": __version__, "python": platform.python_version(), "torch": str(torch.__version__)},
        state=sorted({name.partition(".")[0] for name in metadata.state_dict_metadata}),
        files=files,
    )
