"""The folder of one save: hidden while ranks write into it, then the checkpoint by one rename.

    begin     coordinator: leftovers go, `.NAME.saving` is made, with the sentinel in it
    join      every rank: whose save is this?
    publish   coordinator: manifest → sentinel removed → folder flushed → rename to NAME → parent flushed
    give_up   any rank that fails: the folder goes, and with it the save; what stood at NAME was never touched

A checkpoint that is overwritten steps aside as `.NAME.replaced` for the moment of the rename and goes afterwards, in
the background: to remove 4 GB takes a second on some disks. If a crash falls between the two renames, `whole_at` finds
the one that is whole and `begin` puts it back.

The sentinel holds the save's id, so that a save that lost its folder to another notices before it commits; the living
coordinator holds a lock on it, so that one's leftovers can be told from another's work.
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
from reprieve.checkpoint.format.manifest import MANIFEST, SENTINEL, Manifest, read_manifest
from reprieve.checkpoint.restore.resume import make_root
from reprieve.errors import CheckpointError, Fenced, FolderInUse, InvalidCheckpoint
from reprieve.storage.disk import Disk

log = logging.getLogger("reprieve")

METADATA = ".metadata"
DATA_SUFFIX = ".distcp"

_ID = re.compile(r"^save (\S+)$", re.MULTILINE)
_HIDDEN = re.compile(r"\.(.+)\.(saving|deleting|replaced)")
_OF_A_CHECKPOINT = re.compile(rf"(__\d+)?\.metadata(\.tmp)?|.*\.distcp|{re.escape(MANIFEST)}|{re.escape(SENTINEL)}")

_locks: dict[Path, int] = {}
"""Locks that this process holds. A save that another rank made fail has nobody to tell us: it stays here until the next
save to the same place takes it."""

_removals = ThreadPool(1, "reprieve-remove")
"""Of checkpoints that were replaced. An ordinary thread: the interpreter waits for it."""


def saving(target: Path) -> Path:
    return target.with_name(f".{target.name}.saving")


def replaced(target: Path) -> Path:
    return target.with_name(f".{target.name}.replaced")


def begin(disk: Disk, target: Path, save_id: str) -> Path:
    """The folder to write into. Called by the coordinator alone, before any rank writes."""
    wait_for_removals()
    make_root(disk, target.parent)
    folder = saving(target)
    _unlock(folder)
    _sweep(disk, target.parent)
    _recover(disk, target)
    if _is_alive(folder):
        raise FolderInUse(f"{folder} is being written by another process: wait for it, or save under another name")
    try:
        commit.begin(disk, folder, f"save {save_id}\n")
    except BaseException:
        commit.discard(disk, folder)
        raise
    _lock(folder)
    return folder


def join(folder: Path) -> str:
    """The id of the save that is going on in the folder."""
    try:
        found = _ID.search((folder / SENTINEL).read_text())
    except FileNotFoundError:
        raise CheckpointError(
            f"{folder} is not there: another rank gave this save up, or the ranks do not share this storage"
        ) from None
    if found is None:
        raise CheckpointError(f"{folder / SENTINEL} is not ours")
    return found[1]


def give_up(disk: Disk, folder: Path, save_id: str) -> None:
    """Remove a save that cannot become a checkpoint. A second error here would hide the first one."""
    with contextlib.suppress(OSError, CheckpointError):
        if join(folder) == save_id:
            # Renamed first: a rank that is still creating files fails, and can leave nothing in a folder that is going.
            removable = folder.with_name(f"{folder.name.removesuffix('saving')}deleting")
            disk.rename(folder, removable)
            disk.remove_tree(removable)
    _unlock(folder)


def publish(disk: Disk, target: Path, manifest: Manifest, save_id: str) -> None:
    """Make the save visible; durable on return."""
    folder = saving(target)
    if join(folder) != save_id:
        raise Fenced(f"another save to {target} has taken over; this one is not used")
    _check_files(folder, manifest)
    try:
        commit.seal(disk, folder, manifest)
        if target.is_dir() and any(target.iterdir()):
            disk.rename(target, replaced(target))
            disk.flush_folder(target.parent)
        disk.rename(folder, target)
    except BaseException:
        # Without its sentinel nobody would know it for a leftover.
        commit.discard(disk, folder)
        with contextlib.suppress(OSError):
            if not target.exists():
                disk.rename(replaced(target), target)
        raise
    disk.flush_folder(target.parent)
    _unlock(folder)
    _keep_others(disk, target)
    _removals.submit(partial(_remove_replaced, disk, target))


def wait_for_removals() -> None:
    """Until everything that this process replaced is gone."""
    _removals.join()


def whole_at(target: Path) -> Path:
    """Where the checkpoint that belongs at `target` is: there, unless a crash fell between the two renames."""
    if not target.exists():
        # Without its sentinel it may be whole, or a crash came before its names were durable: the manifest tells.
        if saving(target).is_dir():
            found = inspect_checkpoint(saving(target))
            if found.refused is not None:
                raise found.refused  # it may be the whole one
            if found.manifest is not None and found.problem is None:
                return found.path
        if replaced(target).is_dir():
            return replaced(target)
    return target


def _recover(disk: Disk, target: Path) -> None:
    """Finish what a crash interrupted."""
    if (whole := whole_at(target)) != target:
        disk.rename(whole, target)
        disk.flush_folder(target.parent)
        log.warning("%s is back: a crash had fallen between the renames of a commit", target)
    _keep_others(disk, target)
    _remove_replaced(disk, target)


def _keep_others(disk: Disk, target: Path) -> None:
    """What others had put beside the checkpoint that was replaced moves to the new one."""
    old = replaced(target)
    if not old.is_dir():
        return
    ours = _files_of(old)
    others = [path for path in old.iterdir() if path.name not in ours and not (target / path.name).exists()]
    for path in others:
        with contextlib.suppress(FileNotFoundError):  # two processes may be at it, after a crash
            disk.rename(path, target / path.name)
    if others:
        disk.flush_folder(target)
        disk.flush_folder(old)


def _remove_replaced(disk: Disk, target: Path) -> None:
    try:
        disk.remove_tree(replaced(target))
    except OSError as error:
        log.warning("%s is left behind: %s. The next save tries again", replaced(target), error)


def _sweep(disk: Disk, parent: Path) -> None:
    """Remove what saves and removals of dead processes left beside us. Whoever may be alive is left alone."""
    for path in sorted(parent.iterdir()):
        if (hidden := _HIDDEN.fullmatch(path.name)) is None or path.is_symlink() or not path.is_dir():
            continue
        name, why = hidden.groups()
        try:
            if why == "replaced" and (parent / name / MANIFEST).exists():
                _keep_others(disk, parent / name)
                _remove_replaced(disk, parent / name)
            elif (why == "saving" and _is_dead(path)) or (why == "deleting" and _holds_only_ours(path)):
                disk.remove_tree(path)
                log.warning("removed %s: a save or a removal that never finished", path)
        except OSError as error:  # gone by itself, or another user's: no reason not to save
            log.info("%s is left where it is: %s", path, error)


def _is_alive(folder: Path) -> bool:
    """Somebody holds its lock."""
    with contextlib.suppress(OSError):
        if (fd := _try_lock(folder)) is None:
            return True
        os.close(fd)
    return False


def _is_dead(folder: Path) -> bool:
    """A save of ours that nobody is working on, for sure."""
    try:
        if _ID.search((folder / SENTINEL).read_text()) is None or not _holds_only_ours(folder):
            return False
        fd = _try_lock(folder)
    except OSError:  # a file system without locks: it goes with the next save of its own name
        return False
    if fd is not None:
        os.close(fd)
    return fd is not None


def _lock(folder: Path) -> None:
    with contextlib.suppress(OSError):
        if (fd := _try_lock(folder)) is not None:
            _locks[folder] = fd


def _try_lock(folder: Path) -> int | None:
    """None where another holds it; OSError where there are no locks."""
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


def _holds_only_ours(folder: Path) -> bool:
    return all(_OF_A_CHECKPOINT.fullmatch(path.name) for path in folder.iterdir())


def _files_of(folder: Path) -> set[str]:
    """Names in a checkpoint that belong to the checkpoint itself."""
    found = {path.name for path in folder.iterdir() if _OF_A_CHECKPOINT.fullmatch(path.name)}
    with contextlib.suppress(OSError, InvalidCheckpoint):
        found |= set(read_manifest(folder).files)
    return found


def _check_files(folder: Path, manifest: Manifest) -> None:
    """What the ranks said they wrote is what can be seen from here."""
    for name, entry in manifest.files.items():
        try:
            size = (folder / name).stat().st_size
        except FileNotFoundError:
            raise CheckpointError(f"{folder / name} is not there: do all ranks share this storage?") from None
        if size != entry.bytes:
            raise CheckpointError(f"{folder / name} has {size:,} bytes; the rank that wrote it says {entry.bytes:,}")
