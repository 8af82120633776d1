"""Makes a save visible as a checkpoint in one step: begin, write, then commit or discard.

    begin     make `.checkpoint-N.saving-A` (by attempt A) with the sentinel in it
    commit    manifest written and flushed → sentinel removed → folder flushed → rename to `checkpoint-N` → root flushed
    discard   remove what was written; the older checkpoints were never touched

A save that replaces a valid checkpoint of the same step exchanges the two names. Where the file system cannot do that
and a crash comes between two renames, the next start gives the old one its name back (`startup.clean_up`).

The order of the flushes is the guarantee: a visible name stands for durable bytes. A test fails for each of them that
is taken out (tests/powercut).
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

_REMOVAL_ATTEMPTS = 100
"""How often to remove files that other ranks still make: each makes a few before it learns of the failure."""


def begin(disk: Disk, folder: Path, note: str = "") -> None:
    """Make the folder to write into. `note`: text for a person who reads the sentinel."""
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
    lease: FolderLease,
    *,
    replacing: str | None,
    superseding: bool = False,
) -> Path:
    """Make the save visible; durable on return.

    `replacing`: why a `checkpoint-N` that has the name already is quarantined.
    `superseding`: that checkpoint is valid. It stays until the new one has its name, and is removed then.
    """
    target = paths.checkpoint(root, manifest.step)
    # From the first change on: an attempt that was fenced must not touch the folder of its successor.
    with lease.committing():
        seal(disk, folder, manifest)
        if superseding and target.exists():
            _replace(disk, folder, target)
        else:
            if target.exists():
                if replacing is None:
                    raise CheckpointError(
                        f"{target} appeared while it was being saved: does another program write here? "
                        "Stop it, or give it another folder"
                    )
                quarantine(disk, target, replacing)
            disk.rename(folder, target)
        disk.flush_folder(root)
    if superseding:
        discard(disk, paths.replaced(target))
    return target


def _replace(disk: Disk, folder: Path, target: Path) -> None:
    """Give `folder` the name of `target`. The caller flushes; the old checkpoint stays until then, because a crash may
    bring its name back."""
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
    """Complete a folder whose files are written and durable. It then only needs its name."""
    disk.write_file(folder / MANIFEST, manifest.encode())
    disk.remove(folder / SENTINEL)
    _check_listing(folder, manifest)
    # By is_dir: before Python 3.11 the pattern "*/" matches files, too.
    for inner in sorted((path for path in folder.rglob("*") if path.is_dir()), reverse=True):
        disk.flush_folder(inner)
    disk.flush_folder(folder)


def discard(disk: Disk, folder: Path) -> None:
    """Remove an unfinished save, as far as possible: an error here would hide the one that made the save fail. The
    next start removes the rest."""
    for _ in range(_REMOVAL_ATTEMPTS):
        try:
            disk.remove_tree(folder)
        except OSError as error:
            if error.errno == errno.ENOTEMPTY:
                continue  # a rank that does not know of the failure yet has made one more file
        return


def remove(disk: Disk, path: Path) -> None:
    """Delete a checkpoint. A crash in between leaves no visible checkpoint that is not whole."""
    disk.remove_tree(hide(disk, path))


def hide(disk: Disk, path: Path) -> Path:
    """Take a checkpoint's name away: the first part of a removal. Returns the folder that is left to remove."""
    hidden = paths.deleting(path)
    disk.rename(path, hidden)
    disk.flush_folder(path.parent)
    return hidden


def quarantine(disk: Disk, path: Path, reason: str) -> Path:
    """Rename a bad checkpoint without deleting it, and write the reason into it. The caller flushes."""
    target = paths.quarantined(path)
    disk.rename(path, target)
    if target.is_dir():
        disk.replace_file(target / QUARANTINE_NOTE, json.dumps({"reason": reason}).encode() + b"\n")
    return target


def _check_listing(folder: Path, manifest: Manifest) -> None:
    present = {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()}
    if present != {MANIFEST, *manifest.files}:
        # An older attempt that woke up may write files of the same names here.
        unexpected = sorted(present ^ {MANIFEST, *manifest.files})
        raise CheckpointError(f"{folder} does not hold exactly what was written: {', '.join(unexpected[:5])}")
