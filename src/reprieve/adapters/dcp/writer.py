"""`StorageWriter`: what `dcp.save` and `dcp.async_save` write through.

DCP calls, in this order: prepare_local_plan (all ranks) → prepare_global_plan (coordinator) → write_data (all ranks) →
finish (coordinator). DCP gathers the ranks' results and errors between the steps, and raises any rank's error on all of
them; so nothing here waits for another rank. What a rank wrote and its checksums travel to the coordinator as one more
result in its list, and end up in the manifest, not in `.metadata`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
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
from reprieve.adapters.dcp.item_layout import estimated_bytes, lay_out
from reprieve.checkpoint.buffers.block_pool import BLOCK_BYTES, BlockPool
from reprieve.checkpoint.format.checksum import digest_of
from reprieve.checkpoint.format.manifest import FileEntry, Manifest
from reprieve.checkpoint.io.writer import Writer
from reprieve.errors import CheckpointError, ConfigError, Fenced, StorageFull
from reprieve.storage.disk import Disk, explain, free_bytes
from reprieve.storage.uri import local_path
from reprieve.units import format_size


@dataclass(frozen=True, slots=True)
class _Part:
    """The plan of one rank: which file is its own."""

    prefix: str


@dataclass(frozen=True, slots=True)
class _Written:
    """What one rank tells the coordinator."""

    save_id: str
    files: Mapping[str, FileEntry]


class StorageWriter(storage.StorageWriter):
    """Writes a DCP checkpoint that is visible only when it is whole, durable and checksummed.

    The files are stock DCP's. Whatever goes wrong on any rank, `dcp.save` raises on all of them, nothing new is
    visible, and what was at `path` before is still there.
    """

    def __init__(self, path: str | os.PathLike[str], *, overwrite: bool = True, disk: Disk | None = None) -> None:
        """
        path: the checkpoint's folder, on storage that all ranks share. `checkpoint_id` of `dcp.save` takes its place.
        overwrite: replace a checkpoint that is there already, once the new one is whole. False refuses to.
        disk: for tests.
        """
        super().__init__()
        self.path = located(path)
        self.overwrite = overwrite
        self._disk = disk or Disk()
        self._save_id = str(uuid.uuid4())

    # What DCP calls

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id:
            self.path = located(checkpoint_id)
        self._save_id = str(uuid.uuid4())

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if not kwargs.get("use_collectives", True):
            raise ConfigError(
                "use_collectives=False: without the ranks' agreement nobody knows when a checkpoint is whole. "
                "Leave it out, or use DCP's own FileSystemWriter"
            )

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Before any rank writes: is there room, and may we? Then the folder is made."""
        self._save_id = str(uuid.uuid4())
        with self._explained():
            if not self.overwrite and (self.path / save_folder.METADATA).exists():
                raise CheckpointError(f"{self.path} is there already, and overwrite=False")
            if self.path.exists() and not self.path.is_dir():
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(self.path))
            self._check_room(sum(estimated_bytes(plan) for plan in plans))
            save_folder.begin(self._disk, self.path, self._save_id)
        # With a planner that caches plans these are not the ones that ranks get: the prefix is all that may be in here.
        return [dataclasses.replace(plan, storage_data=_Part(f"__{rank}_")) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """This rank's items, as one file; durable on return."""
        into = save_folder.saving(self.path)
        save_id = save_folder.join(into)
        with self._giving_up(into, save_id) as needed:
            part: _Part = plan.storage_data
            laid_out = lay_out(f"{part.prefix}0{save_folder.DATA_SUFFIX}", plan, planner)
            needed.append(laid_out.layout.size)
            layouts = [laid_out.layout] if plan.items else []
            ring = _ring(os.getpid(), bool(laid_out.layout.devices))
            files = Writer(self._disk, ring, into, layouts).write_through()
        written = WriteResult(MetadataIndex("reprieve"), 0, _Written(save_id, files))
        future: Future[list[WriteResult]] = Future()
        future.set_result([*laid_out.results, written])
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """All ranks have written: the checkpoint becomes visible."""
        into = save_folder.saving(self.path)
        with self._giving_up(into, self._save_id):
            items: dict[MetadataIndex, Any] = {}
            files: dict[str, FileEntry] = {}
            for result in (one for of_rank in results for one in of_rank):
                if not isinstance(result.storage_data, _Written):
                    items[result.index] = result.storage_data
                elif result.storage_data.save_id == self._save_id:
                    files |= result.storage_data.files
                else:
                    raise Fenced(f"another save to {self.path} has taken over; this one is not used")
            data = metadata_file.encode(metadata, items, self.storage_meta())
            self._disk.write_file(into / save_folder.METADATA, data)
            files[save_folder.METADATA] = _entry(data)
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

    def _check_room(self, needed: int) -> None:
        place = self.path
        while not place.is_dir():
            place = place.parent
        if needed > (free := free_bytes(place)):
            raise _full(self.path, needed, free)

    @contextlib.contextmanager
    def _giving_up(self, into: Path, save_id: str) -> Iterator[list[int]]:
        """A save that fails here leaves nothing behind. The list takes the bytes that are needed, once known."""
        needed: list[int] = []
        with self._explained(needed):
            try:
                yield needed
            except BaseException:
                save_folder.give_up(self._disk, into, save_id)
                raise

    @contextlib.contextmanager
    def _explained(self, needed: list[int] | None = None) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:
            if needed is not None and not save_folder.saving(self.path).exists():
                raise CheckpointError(f"the save to {self.path} was given up by another rank") from error
            explain(error, self.path)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT) and not isinstance(error, StorageFull):
                raise _full(self.path, sum(needed or []), free_bytes(self.path.parent)) from error
            explain(error, self.path)


def located(path: str | os.PathLike[str]) -> Path:
    """Where the folder really is: a link to it is not replaced, what it points to is."""
    found = local_path(path)
    return found.resolve() if found.is_symlink() else found


def is_local(checkpoint_id: str | os.PathLike[str]) -> bool:
    try:
        local_path(checkpoint_id)
    except ConfigError:
        return False
    return True


@functools.cache
def _ring(_pid: int, pinned: bool) -> BlockPool:
    """One for all saves of a process, made once and kept: people make a new StorageWriter for each save. Pinned only
    where a GPU's memory is read: the process of an asynchronous save should not wake one up."""
    return BlockPool(pinned=pinned)


def _full(path: Path, needed: int, free: int) -> StorageFull:
    return StorageFull(
        errno.ENOSPC,
        f"no room for the checkpoint {path}: {format_size(needed)} needed, {format_size(free)} free. Free some space",
    )


def _entry(data: bytes) -> FileEntry:
    blocks = [digest_of(data[start : start + BLOCK_BYTES]) for start in range(0, len(data), BLOCK_BYTES)]
    return FileEntry.of(len(data), blocks)


def _manifest(path: Path, metadata: Metadata, files: Mapping[str, FileEntry], *, world_size: int) -> Manifest:
    # DCP knows neither runs nor steps. People put the step into the folder's name.
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
