"""Keeps the list of a run's checkpoints readable: Ray writes it in place, and a torn one makes the run unusable.

In a controller, Ray's snapshot is written to another name and renamed, with a copy beside it. A snapshot that was torn
before (by a controller without us), or that is missing, is replaced by the copy when it is loaded. A copy that names
checkpoints which are gone is not used: Ray would refuse it.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from reprieve.adapters.ray import internals
from reprieve.adapters.ray.internals import RunStorage
from reprieve.adapters.ray.progress import step_of
from reprieve.storage.disk import Disk

log = logging.getLogger("reprieve")

_COPY = ".copy"


def guard_snapshots() -> None:
    """Guard the snapshots that this process writes and loads."""
    internals.replace_snapshot_io(_write, repair)


def _write(storage: RunStorage, data: bytes) -> None:
    for name in (storage.snapshot + _COPY, storage.snapshot):
        _replace(storage.files, name, data)


def _replace(files: Any, path: str, data: bytes) -> None:
    """Write a file whole. Object stores do that by themselves, and some cannot rename."""
    if files.type_name == "local":
        Disk().replace_file(Path(path), data)
        return
    with files.open_output_stream(path) as stream:
        stream.write(data)


def repair(storage: RunStorage) -> None:
    """Put the copy of the snapshot in the place of one that is torn or missing."""
    path, copy_path = storage.snapshot, storage.snapshot + _COPY
    problem = _problem(storage, path)
    if problem is None:
        return
    copy, problem_of_copy = _read(storage.files, copy_path), _problem(storage, copy_path)
    if copy is not None and problem_of_copy is None:
        _replace(storage.files, path, copy)
        log.warning("%s %s: replaced by its copy", path, problem)
    elif problem != _MISSING:
        log.error("%s %s, and its copy %s: Ray refuses to use this folder", path, problem, problem_of_copy)
    elif problem_of_copy != _MISSING:
        log.warning("%s %s, and its copy %s: Ray starts this run over", path, problem, problem_of_copy)


def named_checkpoints(run_folder: Path) -> list[Path]:
    """Return the checkpoints that the snapshot of a run names. They must stay where they are."""
    try:
        state = json.loads((run_folder / internals.CHECKPOINT_MANAGER_SNAPSHOT_FILENAME).read_bytes())
    except (OSError, ValueError):
        return []
    return [run_folder / name for name in internals.checkpoints_in(state)]


def resumed_step(storage: RunStorage) -> int | None:
    """Return the step of the checkpoint that Ray resumes from; None: there is none."""
    try:
        return step_of(internals.latest_metrics_in(json.loads(_read(storage.files, storage.snapshot) or b"{}")))
    except Exception as error:  # noqa: BLE001 - only the progress needs it
        log.debug("the step that Ray resumes from is unknown: %s", error)
        return None


_MISSING = "is missing"


def _problem(storage: RunStorage, path: str) -> str | None:
    data = _read(storage.files, path)
    if data is None:
        return _MISSING
    try:
        state = json.loads(data)
    except ValueError:
        return "is torn" if data else "is empty"
    if not isinstance(state, dict) or not state:
        return "is empty"
    gone = next((name for name in internals.checkpoints_in(state) if not storage.has_checkpoint(name)), None)
    return None if gone is None else f"names {gone}, which is gone"


def _read(files: Any, path: str) -> bytes | None:
    try:
        with files.open_input_stream(path) as stream:
            data: bytes = stream.read()
            return data
    except FileNotFoundError:
        return None
