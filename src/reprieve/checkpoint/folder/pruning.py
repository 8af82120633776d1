"""Retention at work: the newest checkpoint is read back, then older ones go. On rank 0, on a thread beside training.

A save that somebody waits for has the disk to itself: a read-back that is running gives way. But only once: saves
without a pause would keep it from ever ending, until the disk is full.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from reprieve.checkpoint.buffers.block_pool import BlockPool
from reprieve.checkpoint.folder import paths
from reprieve.checkpoint.folder.catalog import CheckpointInfo, list_checkpoints
from reprieve.checkpoint.folder.disk_space import check_room, warn_if_tight
from reprieve.checkpoint.folder.lease import FolderLease
from reprieve.checkpoint.folder.retention import Retention, hide_unless_read
from reprieve.checkpoint.folder.verify import verify
from reprieve.errors import InvalidCheckpoint
from reprieve.storage.disk import Disk

log = logging.getLogger("reprieve")


class Pruner:
    """What has gone, may go and must stay in one folder."""

    def __init__(self, disk: Disk, root: Path, retention: Retention) -> None:
        self._disk = disk
        self._root = root
        self._retention = retention
        self.newest: int | None = None
        """The step that was saved or restored last: it stays."""
        self.verified: int | None = None
        """The step of the last one of which every byte was read."""
        self.pinned: frozenset[int | None] = frozenset()
        """Steps that stay, whatever retention says."""
        self._tight_told = False
        """Was it said, or looked for a second time?"""
        self._hurry = threading.Event()
        self._gave_way = False

    def look_around(self, run: str, needed: int) -> None:
        """At start-up: is there room, and what has the run saved before?"""
        found = list_checkpoints(self._root)
        ours = [one for one in found if one.problem is None and one.manifest and one.manifest.run == run]
        self.newest = ours[0].step if ours else None
        removable = self._retention.removable(found, run, ours[0].step) if ours else []
        check_room(self._root, needed, going=sum(one.bytes for one in removable))
        self._tight_told = warn_if_tight(self._root, needed, self._retention, found)

    def look_again(self, needed: int) -> None:
        """At the first save, for which the optimizer has its state: is there room for all that is to be kept?"""
        if not self._tight_told:
            self._tight_told = True
            with contextlib.suppress(OSError):  # no reason not to save
                warn_if_tight(self._root, needed, self._retention, list_checkpoints(self._root))

    def saved(self, step: int | None) -> None:
        """It is durable, and was not read back yet."""
        self.newest = step
        if self.verified == step:
            self.verified = None

    @contextlib.contextmanager
    def giving_way(self) -> Iterator[None]:
        """While inside, somebody waits for a save."""
        self._hurry.set()
        try:
            yield
        finally:
            self._hurry.clear()

    def prune(self, owner: FolderLease) -> None:
        """Remove what retention no longer wants, once the newest has been read back and verified."""
        if (newest := self.newest) is None:
            return
        removable = self._retention.removable(list_checkpoints(self._root), owner.run, newest, self.pinned)
        if (verified := self.verified) is not None:
            # What is older than one that was read back need not wait for the next; that one itself stays until then.
            self._remove([one for one in removable if one.step < verified], owner)
            removable = [one for one in removable if one.step >= verified]
        if not removable:
            return
        if newest != verified:
            try:
                verify(paths.checkpoint(self._root, newest), BlockPool(limit=2), progress=self._give_way)
            except _YieldToSave:
                return  # the save that interrupted us is followed by another pass
            except (InvalidCheckpoint, OSError) as error:
                log.error("nothing is removed: the newest checkpoint did not pass when read back: %s", error)
                return
            self.verified, self._gave_way = newest, False
        self._remove(removable, owner)

    def _remove(self, removable: Sequence[CheckpointInfo], owner: FolderLease) -> None:
        for one in removable:
            with owner.committing():
                hidden = hide_unless_read(self._disk, one.path)
            if hidden is None:
                log.info("%s is being read: it goes at the next save", one.path)
                continue
            # Not under the lock: a commit or a release would wait for it. Whoever takes over meanwhile removes it, too.
            self._disk.remove_tree(hidden)
            log.info("removed %s: no longer wanted", one.path)

    def _give_way(self, _count: int) -> None:
        if self._hurry.is_set() and not self._gave_way:
            self._gave_way = True
            raise _YieldToSave


class _YieldToSave(Exception):
    """Somebody waits for a save: reading back can wait."""
