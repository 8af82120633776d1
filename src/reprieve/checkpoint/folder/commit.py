"""A save becomes a checkpoint in one step: begin, write, then commit or discard.

    begin     make `.checkpoint-N.saving-A` (by attempt A) with the sentinel in it
    commit    manifest written and flushed → sentinel removed → folder flushed → rename to `checkpoint-N` → root flushed
    discard   remove what was written; the older checkpoints were never touched

A save that replaces a valid checkpoint of the same step exchanges the two names. Where the file system cannot do that,
`clean_up` gives the old one its name back, should a crash come between two renames.

The order of the flushes is the guarantee: a name that is visible stands for bytes that are durable. Each of them is
missed by a test when it is taken out (tests/powercut).
"""

from __future__ import annotations

import errno
import json
import logging
from pathlib import Path

from reprieve.checkpoint.folder import paths
from reprieve.checkpoint.folder.lease import FolderLease
from reprieve.checkpoint.format.manifest import MANIFEST, SENTINEL, Manifest
from reprieve.errors import CheckpointError
from reprieve.storage.disk import Disk

log = logging.getLogger("reprieve")

QUARANTINE_NOTE = "reprieve-set-aside.json"

_FILES_MORE = 100
"""How often to look again for files of other ranks. Each rank makes a few, and hears of the failure meanwhile."""


def begin(disk: Disk, folder: Path, note: str = "") -> None:
    """Make the folder to write into. The note is for whoever reads the sentinel."""
    disk.remove_tree(folder)
    disk.make_folder(folder)
    # Not flushed: the folder's name already says what this says, and both are gone after the commit.
    text = f"A save is in progress, or was cut short. Do not load this checkpoint.\n{note}"
    disk.write_file(folder / SENTINEL, text.encode(), flush=False)


def commit(
    disk: Disk,
    root: Path,
    folder: Path,
    manifest: Manifest,
    owner: FolderLease,
    *,
    replacing: str | None,
    superseding: bool = False,
) -> Path:
    """Make the save visible; durable on return. A `checkpoint-N` that is in the way is set aside, for that reason;
    with `superseding` it is valid, stays until the new one has its name, and is removed then."""
    target = paths.checkpoint(root, manifest.step)
    # From the first change on: an attempt that was fenced must leave the folder of its successor alone.
    with owner.committing():
        seal(disk, folder, manifest)
        if superseding and target.exists():
            _replace(disk, folder, target)
        else:
            if target.exists():
                if replacing is None:
                    raise CheckpointError(
                        f"{target} appeared while it was being saved: does another program write here?"
                    )
                quarantine(disk, target, replacing)
            disk.rename(folder, target)
        disk.flush_folder(root)
    if superseding:
        discard(disk, paths.replaced(target))
    return target


def _replace(disk: Disk, folder: Path, target: Path) -> None:
    """The caller flushes. Until then the old one must not go: a crash may bring its name back."""
    old = paths.replaced(target)
    disk.remove_tree(old)
    if disk.exchange(folder, target):
        disk.rename(folder, old)
        return
    disk.rename(target, old)
    try:
        disk.rename(folder, target)
    except OSError:
        disk.rename(old, target)
        raise


def seal(disk: Disk, folder: Path, manifest: Manifest) -> None:
    """All files are written and durable: now the folder is whole, and needs only its name."""
    disk.write_file(folder / MANIFEST, manifest.encode())
    disk.remove(folder / SENTINEL)
    _check_listing(folder, manifest)
    # By is_dir: before Python 3.11 the pattern "*/" matches files, too.
    for inner in sorted((path for path in folder.rglob("*") if path.is_dir()), reverse=True):
        disk.flush_folder(inner)
    disk.flush_folder(folder)


def discard(disk: Disk, folder: Path) -> None:
    """Remove an unfinished save. A second error here would hide the first one: what is left goes at the next start."""
    for _ in range(_FILES_MORE):
        try:
            disk.remove_tree(folder)
        except OSError as error:
            if error.errno == errno.ENOTEMPTY:
                continue  # a rank that has not heard of the failure yet has made one more file
        return


def remove(disk: Disk, path: Path) -> None:
    """Delete a checkpoint so that a crash in between leaves nothing visible that is not whole."""
    disk.remove_tree(hide(disk, path))


def hide(disk: Disk, path: Path) -> Path:
    """The first part of a removal, and the only one that anybody could notice; what is left to remove."""
    removable = paths.deleting(path)
    disk.rename(path, removable)
    disk.flush_folder(path.parent)
    return removable


def quarantine(disk: Disk, path: Path, reason: str) -> Path:
    """Take a bad checkpoint out of the way without deleting it, and leave the reason in it. The caller flushes."""
    target = paths.quarantined(path)
    disk.rename(path, target)
    if target.is_dir():
        disk.replace_file(target / QUARANTINE_NOTE, json.dumps({"reason": reason}).encode() + b"\n")
    return target


def clean_up(disk: Disk, root: Path) -> list[str]:
    """Remove what a dead attempt left behind, and foreign saves that never finished; their names."""
    removed = []
    for path in root.iterdir():
        if (before := paths.name_before(path)) is not None and not before.exists():
            disk.rename(path, before)
            disk.flush_folder(root)
            log.warning("renamed %s back to %s: the save that should replace it never finished", path, before.name)
    for path in sorted(root.iterdir()):
        if paths.is_leftover(path):
            disk.remove_tree(path)
            removed.append(path.name)
        elif paths.step_of(path) is not None and (path / SENTINEL).exists():
            remove(disk, path)
            removed.append(path.name)
    return removed


def _check_listing(folder: Path, manifest: Manifest) -> None:
    present = {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()}
    if present != {MANIFEST, *manifest.files}:
        # An older attempt that woke up writes here by the same names.
        odd = sorted(present ^ {MANIFEST, *manifest.files})
        raise CheckpointError(f"{folder} does not hold exactly what was written: {', '.join(odd[:5])}")
