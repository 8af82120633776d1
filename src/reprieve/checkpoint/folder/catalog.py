"""Lists the checkpoints in a folder, newest first, each with its validity as far as a quick look can tell.

Listing trusts a manifest whose own checksum holds and whose files have the right sizes. The bytes are verified when
they are read (`restore`, `verify`). A folder without a Reprieve manifest is a foreign checkpoint, unless one of its
files shows that Reprieve wrote it; `check_foreign` reads those whole.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from reprieve.checkpoint.folder import paths
from reprieve.checkpoint.folder.commit import QUARANTINE_NOTE
from reprieve.checkpoint.format.manifest import ARCHIVE_MARK, MANIFEST, SENTINEL, Manifest, read_manifest
from reprieve.errors import InvalidCheckpoint
from reprieve.storage.disk import DAMAGE

_TAIL_BYTES = 512
"""The end of a zip: 22 bytes and the comment."""


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """One checkpoint on storage."""

    path: Path
    step: int
    manifest: Manifest | None
    """None: a foreign checkpoint, or one that cannot be read."""
    problem: str | None
    """Why it cannot be used; None if no problem is known so far."""
    bytes: int
    created: datetime
    refused: OSError | None = None
    """The storage's error, where the storage and not the checkpoint is the problem."""

    def check(self) -> None:
        """Raise InvalidCheckpoint, or the storage's error, if it cannot be used."""
        if self.refused is not None:
            raise self.refused
        if self.problem is not None:
            raise InvalidCheckpoint(self.problem, path=self.path)

    @property
    def is_quarantined(self) -> bool:
        return paths.step_of(self.path) is None

    @property
    def is_foreign(self) -> bool:
        return self.manifest is None and self.problem is None


def list_checkpoints(root: Path) -> list[CheckpointInfo]:
    """Every checkpoint in the folder, newest first, quarantined ones at the end."""
    if not root.is_dir():
        return []
    checkpoints, quarantined = [], []
    for path in root.iterdir():
        try:
            if (step := paths.step_of(path)) is not None:
                checkpoint = inspect_checkpoint(path, step)
                if checkpoint.problem is None or os.path.lexists(path):
                    checkpoints.append(checkpoint)
            elif (step := paths.step_of_quarantined(path)) is not None:
                quarantined.append(_inspect_quarantined(path, step))
        except FileNotFoundError:
            if os.path.lexists(path):
                raise
            # Pruned since the folder was listed.
    return [
        *sorted(checkpoints, key=lambda checkpoint: -checkpoint.step),
        *sorted(quarantined, key=lambda checkpoint: (-checkpoint.step, checkpoint.path.name)),
    ]


def count_created(checkpoints: Sequence[CheckpointInfo], run: str) -> int:
    """How many checkpoints the run has made. Their manifests number them, because retention removes older ones; those
    of versions that did not number them count as they are."""
    manifests = [each.manifest for each in checkpoints if each.manifest is not None and each.manifest.run == run]
    return max([len(manifests), *(manifest.number or 0 for manifest in manifests)])


def inspect_checkpoint(path: Path, step: int | None = None) -> CheckpointInfo:
    """Inspect one checkpoint without reading its data; FileNotFoundError if there is none."""
    step = step if step is not None else paths.step_of(path)
    created = _created(path)
    try:
        manifest, problem = _manifest_of(path, step)
        size = _bytes(path) if manifest is None else manifest.size
    except OSError as error:
        refused = None if error.errno in DAMAGE else error
        return CheckpointInfo(path, step or 0, None, f"cannot be read: {error.strerror}", 0, created, refused)
    if manifest is None:
        return CheckpointInfo(path, step or 0, None, problem, size, created)
    return CheckpointInfo(
        path,
        step if step is not None else manifest.step,
        manifest,
        problem,
        size,
        datetime.fromisoformat(manifest.created),
    )


def _manifest_of(path: Path, step: int | None) -> tuple[Manifest | None, str | None]:
    """The manifest, if there is one that can be read, and why the checkpoint cannot be used."""
    manifest = None
    try:
        if not path.is_dir() or path.is_symlink():
            raise InvalidCheckpoint("not a folder")
        if (path / SENTINEL).exists():
            raise InvalidCheckpoint(f"the save never finished ({SENTINEL} is there)")
        try:
            manifest = read_manifest(path)
        except FileNotFoundError:
            _refuse_without_manifest(path)
            return None, None
        if step is not None and manifest.step != step:
            raise InvalidCheckpoint(f"{MANIFEST} belongs to checkpoint-{manifest.step}")
        _check_files(path, manifest)
    except InvalidCheckpoint as error:
        return manifest, error.reason
    return manifest, None


def _refuse_without_manifest(path: Path) -> None:
    """Raise InvalidCheckpoint if Reprieve wrote this: without its manifest, neither its run nor its completeness is
    known."""
    for file in sorted(path.iterdir()):
        if file.suffix in (".pt", ".pth") and stat.S_ISREG(file.lstat().st_mode):
            with file.open("rb") as opened:
                opened.seek(max(0, opened.seek(0, os.SEEK_END) - _TAIL_BYTES))
                _, _, end = opened.read().rpartition(b"PK\x05\x06")
            if end[18:].startswith(ARCHIVE_MARK):
                raise InvalidCheckpoint(
                    f"{MANIFEST} is missing ({file.name} shows that Reprieve wrote this checkpoint)"
                )


def _check_files(path: Path, manifest: Manifest) -> None:
    for name, entry in manifest.files.items():
        file = path / name
        # A link could lead out of the folder, or to a file that changes meanwhile.
        if any(parent.is_symlink() for parent in file.parents if parent.is_relative_to(path)):
            raise InvalidCheckpoint(f"{name} leads out of the checkpoint", path=path)
        try:
            info = file.lstat()
        except OSError as error:
            if error.errno not in DAMAGE:
                raise
            raise InvalidCheckpoint(f"{name} is missing", path=path) from error
        if not stat.S_ISREG(info.st_mode):
            raise InvalidCheckpoint(f"{name} is not a plain file", path=path)
        if info.st_size != entry.bytes:
            raise InvalidCheckpoint(f"{name} has {info.st_size:,} bytes instead of {entry.bytes:,}", path=path)


def _inspect_quarantined(path: Path, step: int) -> CheckpointInfo:
    try:
        reason = json.loads((path / QUARANTINE_NOTE).read_bytes())["reason"]
    except (OSError, ValueError, KeyError, TypeError):
        reason = "unknown"
    manifest = None
    with contextlib.suppress(OSError, InvalidCheckpoint):
        manifest = read_manifest(path)
    return CheckpointInfo(path, step, manifest, f"quarantined: {reason}", _bytes(path), _created(path))


def _bytes(path: Path) -> int:
    """The size of all files below, as far as they can be inspected."""
    size = 0
    for file in path.rglob("*") if path.is_dir() else ():
        with contextlib.suppress(OSError):
            info = file.lstat()
            size += info.st_size if stat.S_ISREG(info.st_mode) else 0
    return size


def _created(path: Path) -> datetime:
    return datetime.fromtimestamp(path.lstat().st_mtime, timezone.utc)
