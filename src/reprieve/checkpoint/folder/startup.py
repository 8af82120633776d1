"""The start of an attempt in a checkpoint folder, before anything is saved or restored. Two agreements of all ranks:

own    every rank plans its first save; rank 0 makes the folder, takes its lease, removes what dead attempts left
       behind and checks the free space
join   the other ranks confirm that they see rank 0's lease, so that all of them write to the same folder
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from reprieve.checkpoint.folder import commit, paths
from reprieve.checkpoint.folder.catalog import list_checkpoints
from reprieve.checkpoint.folder.lease import FolderLease, LeaseRecord, LeaseView, acquire, join
from reprieve.checkpoint.folder.pruning import Pruner
from reprieve.checkpoint.folder.storage_errors import explained, permitted
from reprieve.checkpoint.format.manifest import SENTINEL
from reprieve.clock import Clock
from reprieve.ranks.group import Ranks
from reprieve.storage.disk import Disk

log = logging.getLogger("reprieve")

_VISIBLE_WITHIN = timedelta(seconds=30)
"""How long after rank 0 the other ranks may see what it wrote: network file systems cache directory entries."""


class FolderStartup:
    """One rank's part in the start of an attempt."""

    def __init__(
        self, disk: Disk, root: Path, ranks: Ranks, pruner: Pruner, clock: Clock, *, start_over: str | None
    ) -> None:
        """`start_over`: a request to move the checkpoints that are there to a folder beside them. A request with an id
        is carried out once; one without (an empty text) at every start. None: no request."""
        self._disk = disk
        self._root = root
        self._ranks = ranks
        self._pruner = pruner
        self._clock = clock
        self._start_over = start_over
        self._lease: LeaseView | None = None

    def take_lease(self, run: str | None, *, wait: timedelta, plan_first_save: Callable[[], int]) -> LeaseView:
        """Take the folder's lease for all ranks; on every rank but 0, its view of it.

        `wait`: how long to wait for an earlier attempt of the same run that is still alive.
        `plan_first_save`: called on every rank; returns the bytes that the save takes on the disk.
        """
        limit = self._ranks.limit
        visible_within = min(_VISIBLE_WITHIN, limit)
        try:
            records = self._ranks.agree("own", partial(self._own, run, wait, plan_first_save), limit=limit + wait)
            # The limit is longer than a rank looks for the record: its error is the one that all ranks should raise.
            self._ranks.agree("join", partial(self._join, records[0], visible_within), limit=limit + visible_within)
        except BaseException:
            if self._lease is not None:
                self._lease.release()
            raise
        assert self._lease is not None
        return self._lease

    def _own(self, run: str | None, wait: timedelta, plan_first_save: Callable[[], int]) -> dict[str, Any]:
        needed = plan_first_save()
        if self._ranks.rank != 0:
            return {}
        with explained(self._root), permitted(self._root):
            make_root(self._disk, self._root)
            lease = self._lease = acquire(self._disk, self._root, run, wait=wait, clock=self._clock)
            clean_up(self._disk, self._root)
            if self._start_over is not None:
                self._move_old_checkpoints(lease, self._start_over)
            self._pruner.inspect_folder(lease.run, needed)
            return asdict(lease.record)

    def _move_old_checkpoints(self, lease: FolderLease, request: str) -> None:
        if request and lease.record.started_over == request:
            log.info("run %r has started over before, and resumes its own checkpoints now", lease.run)
            return
        move_to_previous(self._disk, self._root)
        if request:
            # After the move: if the process dies in between, the next start finds nothing to move.
            lease.mark_started_over(request)

    def _join(self, record: Mapping[str, Any], wait: timedelta) -> None:
        if self._lease is None:
            with explained(self._root):
                self._lease = join(
                    self._root, LeaseRecord(**record), rank=self._ranks.rank, wait=wait, clock=self._clock
                )


def make_root(disk: Disk, root: Path) -> None:
    """Make the folder and its parents, durably: a checkpoint in a folder whose name is lost is lost."""
    if root.is_dir():
        return
    if not root.parent.is_dir():
        make_root(disk, root.parent)
    with contextlib.suppress(FileExistsError):
        disk.make_folder(root)
    disk.flush_folder(root.parent)


def clean_up(disk: Disk, root: Path) -> list[str]:
    """Remove what dead attempts left behind, and saves of other tools that never finished. Returns their names."""
    removed = []
    for path in root.iterdir():
        if (before := paths.name_before(path)) is not None and not before.exists():
            disk.rename(path, before)
            disk.flush_folder(root)
            log.warning("renamed %s back to %s: the save that should replace it never finished", path, before.name)
    for path in sorted(root.iterdir()):
        if paths.is_leftover(path):
            disk.remove_tree(path)
        elif paths.step_of(path) is not None and (path / SENTINEL).exists():
            commit.remove(disk, path)
        else:
            continue
        removed.append(path.name)
        log.warning("removed %s: a save or a removal that never finished", path)
    return removed


def move_to_previous(disk: Disk, root: Path) -> None:
    """Move all checkpoints to a new folder `previous-N`, so that the run starts over."""
    old = [checkpoint.path for checkpoint in list_checkpoints(root)]
    if not old:
        return
    number = 1
    while (previous := root / f"previous-{number}").exists():
        number += 1
    disk.make_folder(previous)
    disk.flush_folder(root)  # before anything moves into it
    for path in old:
        disk.rename(path, previous / path.name)
    disk.flush_folder(previous)
    disk.flush_folder(root)
    log.warning("starting over: %d checkpoints moved to %s", len(old), previous)
