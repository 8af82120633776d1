"""The names in a checkpoint folder. A visible checkpoint is whole; a hidden one is being written or removed.

checkpoint-12                  a checkpoint
checkpoint-12.set-aside        quarantined: found to be bad, or replaced; kept for inspection
.checkpoint-12.saving-3        being written by attempt 3
.checkpoint-12.deleting        being removed
.checkpoint-12.replaced        gave its name to a newer save of the same step, or is about to
.checkpoint-12.collecting-3-0  files of a framework for it, collected on rank 0 by attempt 3
.reprieve/                     the folder's lease
"""

from __future__ import annotations

import re
from pathlib import Path

_CHECKPOINT = re.compile(r"checkpoint-(\d+)")
_QUARANTINED = re.compile(r"checkpoint-(\d+)\.set-aside(?:-\d+)?")
_LEFTOVER = re.compile(r"\.checkpoint-\d+\.(?:(?:saving|collecting)(?:-\d+)*|deleting|replaced)")
_REPLACED = re.compile(r"\.(checkpoint-\d+)\.replaced")

LEASE_FOLDER = ".reprieve"


def checkpoint(root: Path, step: int) -> Path:
    return root / f"checkpoint-{step}"


def saving(root: Path, step: int, attempt: int) -> Path:
    """The folder of a save in progress. The attempt is in its name, so that a rank of an older attempt that wakes up
    does not write into the files of a newer one."""
    return root / f".checkpoint-{step}.saving-{attempt}"


def collecting(root: Path, step: int, attempt: int, rank: int) -> Path:
    return root / f".checkpoint-{step}.collecting-{attempt}-{rank}"


def deleting(path: Path) -> Path:
    return path.with_name(f".{path.name}.deleting")


def replaced(path: Path) -> Path:
    return path.with_name(f".{path.name}.replaced")


def name_before(path: Path) -> Path | None:
    """The name that a replaced checkpoint had; None if `path` is not one."""
    match = _REPLACED.fullmatch(path.name)
    return path.with_name(match[1]) if match else None


def quarantined(path: Path) -> Path:
    """A free name to quarantine `path` under."""
    number, target = 1, path.with_name(f"{path.name}.set-aside")
    while target.exists():
        number += 1
        target = path.with_name(f"{path.name}.set-aside-{number}")
    return target


def step_of(path: Path) -> int | None:
    """The step of a checkpoint's folder; None if `path` is not one."""
    match = _CHECKPOINT.fullmatch(path.name)
    return int(match[1]) if match else None


def step_of_quarantined(path: Path) -> int | None:
    match = _QUARANTINED.fullmatch(path.name)
    return int(match[1]) if match else None


def is_leftover(path: Path) -> bool:
    return _LEFTOVER.fullmatch(path.name) is not None
