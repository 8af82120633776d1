"""Keeps the list of a run's checkpoints readable: Ray writes it in place, and a torn one makes the run unusable.

In a controller, Ray's snapshot is written to another name and renamed, with a copy beside it. A snapshot that was torn
before (by a controller without us), or that is missing, is replaced by the copy when it is loaded. A copy that names
checkpoints which are gone is not used: Ray would refuse it.
"""

from __future__ import annotations

import functools
import json
import logging
from pathlib import Path
from typing import Any

from reprieve.adapters.ray.internals import CHECKPOINT_MANAGER_SNAPSHOT_FILENAME, CheckpointManager
from reprieve.storage.disk import Disk

log = logging.getLogger("reprieve")

_COPY = ".copy"
_GUARDED = "_reprieve_guarded"


def guard_snapshots() -> None:
    """Guard the snapshots that this process writes and loads."""
    if getattr(CheckpointManager, _GUARDED, False):
        return
    setattr(CheckpointManager, _GUARDED, True)
    CheckpointManager._write_state_to_storage = _write  # type: ignore[method-assign]
    original = CheckpointManager._maybe_load_state_from_storage

    @functools.wraps(original)
    def load(manager: Any) -> None:
        repair(manager._storage_context)
        original(manager)

    CheckpointManager._maybe_load_state_from_storage = load  # type: ignore[method-assign]


def _write(manager: Any) -> None:
    storage = manager._storage_context
    data = manager._save_state().encode()
    path = storage.checkpoint_manager_snapshot_path
    for name in (path + _COPY, path):
        _replace(storage.storage_filesystem, name, data)


def _replace(files: Any, path: str, data: bytes) -> None:
    """Write a file whole. Object stores do that by themselves, and some cannot rename."""
    if files.type_name == "local":
        Disk().replace_file(Path(path), data)
        return
    with files.open_output_stream(path) as stream:
        stream.write(data)


def repair(storage: Any) -> None:
    """Put the copy of the snapshot in the place of one that is torn or missing."""
    path = storage.checkpoint_manager_snapshot_path
    problem = _problem(storage, path)
    if problem is None:
        return
    files, copy_path = storage.storage_filesystem, path + _COPY
    copy, problem_of_copy = _read(files, copy_path), _problem(storage, copy_path)
    if copy is not None and problem_of_copy is None:
        _replace(files, path, copy)
        log.warning("%s %s: replaced by its copy", path, problem)
    elif problem != _MISSING:
        log.error("%s %s, and its copy %s: Ray refuses to use this folder", path, problem, problem_of_copy)
    elif problem_of_copy != _MISSING:
        log.warning("%s %s, and its copy %s: Ray starts this run over", path, problem, problem_of_copy)


def named_checkpoints(run_folder: Path) -> list[Path]:
    """Return the checkpoints that the snapshot of a run names. They must stay where they are."""
    try:
        state = json.loads((run_folder / CHECKPOINT_MANAGER_SNAPSHOT_FILENAME).read_bytes())
    except (OSError, ValueError):
        return []
    return [run_folder / result["checkpoint_dir_name"] for result in state.get("checkpoint_results", ())]


_MISSING = "is missing"


def _problem(storage: Any, path: str) -> str | None:
    data = _read(storage.storage_filesystem, path)
    if data is None:
        return _MISSING
    try:
        state = json.loads(data)
    except ValueError:
        return "is torn" if data else "is empty"
    if not isinstance(state, dict) or not state:
        return "is empty"
    for result in state.get("checkpoint_results", ()):
        name = result["checkpoint_dir_name"]
        found = storage.storage_filesystem.get_file_info(storage.build_checkpoint_path_from_name(name))
        if found.type.name == "NotFound":
            return f"names {name}, which is gone"
    return None


def _read(files: Any, path: str) -> bytes | None:
    try:
        with files.open_input_stream(path) as stream:
            data: bytes = stream.read()
            return data
    except FileNotFoundError:
        return None
