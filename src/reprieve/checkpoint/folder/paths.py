"""The names in a checkpoint folder: what is visible is whole, what is hidden is on its way in or out.

checkpoint-12                  a checkpoint
checkpoint-12.set-aside        was in the way or found to be bad, and is kept for a person
.checkpoint-12.saving-3        being written, by attempt 3
.checkpoint-12.deleting        being removed
.checkpoint-12.replaced        gave its name to a newer save of the same step, or is about to
.checkpoint-12.collecting-3-0  what a framework has to say about it on rank 0, on its way in
.reprieve/                     who owns the folder
"""

from __future__ import annotations

import re
from pathlib import Path

_CHECKPOINT = re.compile(r"checkpoint-(\d+)")
_QUARANTINED = re.compile(r"checkpoint-(\d+)\.set-aside(?:-\d+)?")
_LEFTOVER = re.compile(r"\.checkpoint-\d+\.(?:(?:saving|collecting)(?:-\d+)*|deleting|replaced)")
_REPLACED = re.compile(r"\.(checkpoint-\d+)\.replaced")

OWNER_FOLDER = ".reprieve"


def checkpoint(root: Path, step: int) -> Path:
    return root / f"checkpoint-{step}"


def saving(root: Path, step: int, attempt: int) -> Path:
    """With the attempt: a rank of an older one that wakes up must not write into the files of a newer one."""
    return root / f".checkpoint-{step}.saving-{attempt}"


def collecting(root: Path, step: int, attempt: int, rank: int) -> Path:
    return root / f".checkpoint-{step}.collecting-{attempt}-{rank}"


def deleting(path: Path) -> Path:
    return path.with_name(f".{path.name}.deleting")


def replaced(path: Path) -> Path:
    return path.with_name(f".{path.name}.replaced")


def name_before(path: Path) -> Path | None:
    """What a replaced checkpoint was called; None if it is not one."""
    match = _REPLACED.fullmatch(path.name)
    return path.with_name(match[1]) if match else None


def quarantined(path: Path) -> Path:
    """A name that is not taken, to set `path` aside under."""
    number, target = 1, path.with_name(f"{path.name}.set-aside")
    while target.exists():
        number += 1
        target = path.with_name(f"{path.name}.set-aside-{number}")
    return target


def step_of(path: Path) -> int | None:
    """The step of a checkpoint's folder; None if it is not one."""
    match = _CHECKPOINT.fullmatch(path.name)
    return int(match[1]) if match else None


def step_of_quarantined(path: Path) -> int | None:
    match = _QUARANTINED.fullmatch(path.name)
    return int(match[1]) if match else None


def is_leftover(path: Path) -> bool:
    return _LEFTOVER.fullmatch(path.name) is not None
