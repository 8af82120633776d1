"""Finds the checkpoint that the next start of a run resumes from, on storage and without torch."""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass
from pathlib import Path

from reprieve.errors import ReprieveError
from reprieve.storage.uri import display_path, local_path

_TIMEOUT_S = 2.0
"""Unresponsive storage must not delay the exit of the launcher."""


@dataclass(frozen=True, slots=True)
class NextStart:
    """The newest valid checkpoint of a run."""

    folder: str
    checkpoint: str | None = None
    """Its name; None: there is none, and training begins at step 0."""
    step: int = 0

    def __str__(self) -> str:
        if self.checkpoint is None:
            return f"There is no checkpoint in {self.folder}: the next start begins at step 0"
        return f"The next start resumes from {self.checkpoint} (step {self.step}) in {self.folder}"


def find_next_start(checkpoints: str) -> NextStart | None:
    """Return None if it is unknown: no checkpoint is valid, or the storage does not respond."""
    found: list[NextStart] = []

    def search() -> None:
        from reprieve.checkpoint.folder.catalog import list_checkpoints

        with contextlib.suppress(OSError, ReprieveError):
            folder = local_path(checkpoints)
            checkpoints_there = list_checkpoints(folder)
            valid = [checkpoint for checkpoint in checkpoints_there if checkpoint.problem is None]
            if valid:
                found.append(NextStart(display_path(folder), valid[0].path.name, valid[0].step))
            elif not checkpoints_there and not _is_of_ray(folder):
                found.append(NextStart(display_path(folder)))

    thread = threading.Thread(target=search, name="reprieve next start", daemon=True)
    thread.start()
    thread.join(_TIMEOUT_S)
    return found[0] if found else None


def _is_of_ray(folder: Path) -> bool:
    """Whether this is Ray Train's folder of a run: it has Ray's checkpoints, or ours in a folder of its own."""
    return (folder / "reprieve").is_dir() or any(folder.glob("checkpoint_*"))
