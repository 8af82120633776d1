"""Prunes checkpoints: reads the newest one back and verifies it, then removes older ones. On rank 0, on a thread.

A save that blocks training has the disk to itself: a read-back that is running yields to it, but only once. Otherwise
saves without a pause would keep the read-back from ever ending, until the disk is full.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from reprieve.checkpoint.buffers.block_pool import BlockPool
from reprieve.checkpoint.folder import paths
from reprieve.checkpoint.folder.catalog import CheckpointInfo, count_created, list_checkpoints
from reprieve.checkpoint.folder.disk_space import check_room, warn_if_tight
from reprieve.checkpoint.folder.lease import FolderLease
from reprieve.checkpoint.folder.retention import Retention, hide_unless_read
from reprieve.checkpoint.folder.verify import verify
from reprieve.errors import InvalidCheckpoint, StorageFull
from reprieve.storage.disk import Disk

log = logging.getLogger("reprieve")


class Pruner:
    """The removal of old checkpoints from one folder, and the disk space that it makes."""

    def __init__(self, disk: Disk, root: Path, retention: Retention) -> None:
        self._disk = disk
        self._root = root
        self._retention = retention
        self.newest: int | None = None
        """The step that was saved or restored last. It is never removed."""
        self.verified: int | None = None
        """The newest step of which every byte was read back."""
        self.created = 0
        """How many checkpoints the run has made, those that were removed included. Counted on rank 0."""
        self.pinned: frozenset[int | None] = frozenset()
        """Steps to keep, whatever retention says."""
        self._space_checked = False
        """Whether the warning about little space was logged, or the space checked a second time."""
        self._saving: int | None = None
        """The step of the save that blocks training. It may be visible, and durable, before `newest` is this step."""
        self._save_waits = threading.Event()
        self._yielded = False

    def inspect_folder(self, run: str, needed: int) -> None:
        """Find the run's newest checkpoint, count how many it has made, and check that `needed` bytes fit. Called at
        start-up."""
        checkpoints = list_checkpoints(self._root)
        self.created = count_created(checkpoints, run)
        of_run = [each for each in checkpoints if each.problem is None and each.manifest and each.manifest.run == run]
        self.newest = of_run[0].step if of_run else None
        removable = self._retention.removable(checkpoints, run, of_run[0].step) if of_run else []
        check_room(self._root, needed, reclaimable=sum(checkpoint.bytes for checkpoint in removable))
        self._space_checked = warn_if_tight(self._root, needed, self._retention, checkpoints)

    def recheck_space(self, needed: int) -> None:
        """Warn if all checkpoints to keep do not fit. Called at the first save, when the optimizer has its state."""
        if not self._space_checked:
            self._space_checked = True
            with contextlib.suppress(OSError):  # no reason not to save
                warn_if_tight(self._root, needed, self._retention, list_checkpoints(self._root))

    def make_room(self, needed: int, *, prune: Callable[[], None]) -> None:
        """Raise StorageFull unless `needed` bytes fit, after a call of `prune` if they do not at first."""
        try:
            check_room(self._root, needed)
        except StorageFull:
            if self.newest is None:
                raise
            prune()
            check_room(self._root, needed)

    def saved(self, step: int | None) -> None:
        """Note a save that is durable and was not read back yet."""
        self.newest = step
        self.created += 1
        if self.verified == step:
            self.verified = None

    @contextlib.contextmanager
    def giving_way(self, step: int) -> Iterator[None]:
        """While inside, the save of this step blocks training: a read-back yields to it, and its checkpoint stays."""
        self._saving = step
        self._save_waits.set()
        try:
            yield
        finally:
            self._save_waits.clear()
            self._saving = None

    def prune(self, lease: FolderLease) -> None:
        """Remove what retention does not keep, once the newest checkpoint has been read back and verified."""
        # A save that blocks training runs at the same time, and makes its checkpoint visible before it is `newest`. So
        # the order matters: what is in the list is the step of one of the two by now, or older than they are.
        checkpoints = list_checkpoints(self._root)
        saving, newest = self._saving, self.newest
        if newest is None:
            return
        removable = self._retention.removable(checkpoints, lease.run, newest, {*self.pinned, saving})
        if (verified := self.verified) is not None:
            # Checkpoints older than the one that was read back last can go at once; that one itself stays for now.
            self._remove([checkpoint for checkpoint in removable if checkpoint.step < verified], lease)
            removable = [checkpoint for checkpoint in removable if checkpoint.step >= verified]
        if not removable:
            return
        if newest != verified:
            try:
                verify(paths.checkpoint(self._root, newest), BlockPool(limit=2), progress=self._yield_to_save)
            except _YieldToSave:
                return  # the save that interrupted this pass is followed by another one
            except (InvalidCheckpoint, OSError) as error:
                log.error("no checkpoint is removed: the newest one failed verification when read back: %s", error)
                return
            self.verified, self._yielded = newest, False
        self._remove(removable, lease)

    def _remove(self, removable: Sequence[CheckpointInfo], lease: FolderLease) -> None:
        for checkpoint in removable:
            with lease.committing():
                if checkpoint.step in (self._saving, self.newest):
                    continue  # it was replaced since: this is a new one
                hidden = hide_unless_read(self._disk, checkpoint.path)
            if hidden is None:
                log.info("%s is being read: it is removed after the next save", checkpoint.path)
                continue
            # Outside the lock: a commit or a release would wait for it. A newer attempt removes the rest as well.
            self._disk.remove_tree(hidden)
            log.info("removed %s: retention does not keep it", checkpoint.path)

    def _yield_to_save(self, _count: int) -> None:
        if self._save_waits.is_set() and not self._yielded:
            self._yielded = True
            raise _YieldToSave


class _YieldToSave(Exception):
    """A save blocks training: the read-back can wait."""
