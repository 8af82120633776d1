"""The folder of one DCP save: hidden while ranks write into it, then the checkpoint by one rename.

    begin     coordinator: remove leftovers, make `.NAME.saving` with the sentinel in it
    join      every rank: read the ID of the save
    publish   coordinator: manifest → sentinel removed → folder flushed → rename to NAME → parent flushed
    abandon   any rank that fails: remove the folder, and with it the save; what was at NAME is untouched

A checkpoint that is overwritten is renamed to `.NAME.replaced` just before and removed afterwards, in the background:
removing 4 GB takes a second on some disks. After a crash between the two renames, `find_complete` finds the checkpoint
that is complete, and `begin` renames it back.

The sentinel holds the save's ID, so that a save that lost its folder to another one notices before it commits. The
coordinator holds a lock on it, which distinguishes a save in progress from leftovers of a crash.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
from functools import partial
from pathlib import Path

from reprieve.checkpoint.buffers.thread_pool import ThreadPool
from reprieve.checkpoint.folder import commit
from reprieve.checkpoint.folder.catalog import inspect_checkpoint
from reprieve.checkpoint.folder.startup import make_root
from reprieve.checkpoint.format.manifest import MANIFEST, SENTINEL, Manifest, read_manifest
from reprieve.errors import CheckpointError, Fenced, FolderInUse, InvalidCheckpoint
from reprieve.storage.disk import Disk

log = logging.getLogger("reprieve")

METADATA = ".metadata"
DATA_SUFFIX = ".distcp"

_SAVE_ID = re.compile(r"^save (\S+)$", re.MULTILINE)
_HIDDEN_FOLDER = re.compile(r"\.(.+)\.(saving|deleting|replaced)")
_CHECKPOINT_FILE = re.compile(rf"(__\d+)?\.metadata(\.tmp)?|.*\.distcp|{re.escape(MANIFEST)}|{re.escape(SENTINEL)}")

_locks: dict[Path, int] = {}
"""Locks that this process holds. The coordinator is not notified if another rank makes a save fail: the lock then stays
here until the next save to the same folder releases it."""

_removals = ThreadPool(1, "reprieve-remove")
"""Removes replaced checkpoints. It is not a daemon thread: the interpreter waits for it."""


def saving_folder(target: Path) -> Path:
    return target.with_name(f".{target.name}.saving")


def replaced_folder(target: Path) -> Path:
    return target.with_name(f".{target.name}.replaced")


def begin(disk: Disk, target: Path, save_id: str) -> Path:
    """Make the folder to write into. The coordinator alone calls this, before any rank writes."""
    wait_for_removals()
    make_root(disk, target.parent)
    folder = saving_folder(target)
    _unlock(folder)
    _remove_leftovers(disk, target.parent)
    _recover(disk, target)
    if _is_locked(folder):
        raise FolderInUse(f"{folder} is being written by another process: wait for it, or save under another name")
    try:
        commit.begin(disk, folder, f"save {save_id}\n")
    except BaseException:
        commit.discard(disk, folder)
        raise
    _lock(folder)
    return folder


def join(folder: Path) -> str:
    """Return the ID of the save that is in progress in the folder."""
    try:
        found = _SAVE_ID.search((folder / SENTINEL).read_text())
    except FileNotFoundError:
        raise CheckpointError(
            f"{folder} does not exist: another rank abandoned this save, or the ranks do not share this storage"
        ) from None
    if found is None:
        raise CheckpointError(f"{folder / SENTINEL} was not written by Reprieve")
    return found[1]


def abandon(disk: Disk, folder: Path, save_id: str) -> None:
    """Remove a save that failed. Errors are suppressed: they would hide the first one."""
    with contextlib.suppress(OSError, CheckpointError):
        if join(folder) == save_id:
            # Renamed first: a rank that is still creating files fails then, and leaves nothing behind.
            removable = folder.with_name(f"{folder.name.removesuffix('saving')}deleting")
            disk.rename(folder, removable)
            disk.remove_tree(removable)
    _unlock(folder)


def publish(disk: Disk, target: Path, manifest: Manifest, save_id: str) -> None:
    """Make the save visible. It is durable on return."""
    folder = saving_folder(target)
    if join(folder) != save_id:
        raise Fenced(f"another save to {target} has taken over: this one is discarded")
    _check_files(folder, manifest)
    try:
        commit.seal(disk, folder, manifest)
        if target.is_dir() and any(target.iterdir()):
            disk.rename(target, replaced_folder(target))
            disk.flush_folder(target.parent)
        disk.rename(folder, target)
    except BaseException:
        # Without its sentinel, it would not be recognized as a leftover.
        commit.discard(disk, folder)
        with contextlib.suppress(OSError):
            if not target.exists():
                disk.rename(replaced_folder(target), target)
        raise
    disk.flush_folder(target.parent)
    _unlock(folder)
    _move_foreign_files(disk, target)
    _removals.submit(partial(_remove_replaced, disk, target))


def wait_for_removals() -> None:
    """Wait until all checkpoints that this process replaced are removed."""
    _removals.join()


def find_complete(target: Path) -> Path:
    """Return where the checkpoint of `target` is: there, unless a crash fell between the two renames."""
    if not target.exists():
        # Without a sentinel, either it is complete or its names were not durable at the crash: the manifest decides.
        if saving_folder(target).is_dir():
            found = inspect_checkpoint(saving_folder(target))
            if found.refused is not None:
                raise found.refused  # it may be the complete one
            if found.manifest is not None and found.problem is None:
                return found.path
        if replaced_folder(target).is_dir():
            return replaced_folder(target)
    return target


def _recover(disk: Disk, target: Path) -> None:
    """Complete a commit that a crash interrupted."""
    if (complete := find_complete(target)) != target:
        disk.rename(complete, target)
        disk.flush_folder(target.parent)
        log.warning("recovered %s: a crash had interrupted its commit between two renames", target)
    _move_foreign_files(disk, target)
    _remove_replaced(disk, target)


def _move_foreign_files(disk: Disk, target: Path) -> None:
    """Move files that are not the checkpoint's from the replaced checkpoint to the new one."""
    old = replaced_folder(target)
    if not old.is_dir():
        return
    own_files = _checkpoint_files(old)
    foreign = [path for path in old.iterdir() if path.name not in own_files and not (target / path.name).exists()]
    for path in foreign:
        with contextlib.suppress(FileNotFoundError):  # after a crash, two processes may do this at once
            disk.rename(path, target / path.name)
    if foreign:
        disk.flush_folder(target)
        disk.flush_folder(old)


def _remove_replaced(disk: Disk, target: Path) -> None:
    try:
        disk.remove_tree(replaced_folder(target))
    except OSError as error:
        log.warning("cannot remove %s: %s. The next save tries again", replaced_folder(target), error)


def _remove_leftovers(disk: Disk, parent: Path) -> None:
    """Remove what dead processes left in the parent folder. What may be in use stays."""
    for path in sorted(parent.iterdir()):
        if (hidden := _HIDDEN_FOLDER.fullmatch(path.name)) is None or path.is_symlink() or not path.is_dir():
            continue
        name, kind = hidden.groups()
        try:
            if kind == "replaced" and (parent / name / MANIFEST).exists():
                _move_foreign_files(disk, parent / name)
                _remove_replaced(disk, parent / name)
            elif (kind == "saving" and _is_abandoned(path)) or (
                kind == "deleting" and _holds_only_checkpoint_files(path)
            ):
                disk.remove_tree(path)
                log.warning("removed %s: its save or removal never finished", path)
        except OSError as error:  # already removed, or another user's: the save can continue
            log.info("cannot remove %s: %s", path, error)


def _is_locked(folder: Path) -> bool:
    """Whether a process holds the folder's lock."""
    with contextlib.suppress(OSError):
        if (fd := _try_lock(folder)) is None:
            return True
        os.close(fd)
    return False


def _is_abandoned(folder: Path) -> bool:
    """Whether the folder is certainly a save of a dead process."""
    try:
        if _SAVE_ID.search((folder / SENTINEL).read_text()) is None or not _holds_only_checkpoint_files(folder):
            return False
        fd = _try_lock(folder)
    except OSError:  # a file system without locks: the next save of the same name removes it
        return False
    if fd is not None:
        os.close(fd)
    return fd is not None


def _lock(folder: Path) -> None:
    with contextlib.suppress(OSError):
        if (fd := _try_lock(folder)) is not None:
            _locks[folder] = fd


def _try_lock(folder: Path) -> int | None:
    """Return the locked file; None: another process holds the lock. OSError: the file system has no locks."""
    fd = os.open(folder / SENTINEL, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    except BaseException:
        os.close(fd)
        raise
    return fd


def _unlock(folder: Path) -> None:
    if (fd := _locks.pop(folder, None)) is not None:
        os.close(fd)


def _holds_only_checkpoint_files(folder: Path) -> bool:
    return all(_CHECKPOINT_FILE.fullmatch(path.name) for path in folder.iterdir())


def _checkpoint_files(folder: Path) -> set[str]:
    """Return the names in a checkpoint's folder that belong to the checkpoint."""
    found = {path.name for path in folder.iterdir() if _CHECKPOINT_FILE.fullmatch(path.name)}
    with contextlib.suppress(OSError, InvalidCheckpoint):
        found |= set(read_manifest(folder).files)
    return found


def _check_files(folder: Path, manifest: Manifest) -> None:
    """Raise unless the files that the ranks reported are there, with these sizes."""
    for name, entry in manifest.files.items():
        try:
            size = (folder / name).stat().st_size
        except FileNotFoundError:
            raise CheckpointError(f"{folder / name} does not exist: do all ranks share this storage?") from None
        if size != entry.bytes:
            raise CheckpointError(f"{folder / name} has {size:,} bytes, but its rank reported {entry.bytes:,}")
