"""What the next start of a run resumes from: found on storage, without torch, when an attempt has ended."""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass

from reprieve.errors import ReprieveError
from reprieve.storage.uri import local_path, shown

_PATIENCE_S = 2.0
"""Storage that does not answer must not keep the launcher from ending."""


@dataclass(frozen=True, slots=True)
class NextStart:
    """The newest checkpoint that can be used."""

    folder: str
    checkpoint: str | None = None
    """Its name; None: there is none, and training starts at step 0."""
    step: int = 0

    def __str__(self) -> str:
        if self.checkpoint is None:
            return f"There is no checkpoint in {self.folder}: the next start begins at step 0"
        return f"The next start resumes from {self.checkpoint} (step {self.step}) in {self.folder}"


def find_next_start(checkpoints: str) -> NextStart | None:
    """None: it cannot be told, since no checkpoint is valid, or the storage does not answer."""
    found: list[NextStart] = []

    def look() -> None:
        from reprieve.checkpoint.folder.catalog import list_checkpoints

        with contextlib.suppress(OSError, ReprieveError):
            folder = local_path(checkpoints)
            every = list_checkpoints(folder)
            valid = [checkpoint for checkpoint in every if checkpoint.problem is None]
            if valid:
                found.append(NextStart(shown(folder), valid[0].path.name, valid[0].step))
            elif not every:
                found.append(NextStart(shown(folder)))

    thread = threading.Thread(target=look, name="reprieve next start", daemon=True)
    thread.start()
    thread.join(_PATIENCE_S)
    return found[0] if found else None
