"""The attempts of a run, in its checkpoint folder: when each was launched, trained and ended, and why it ended.

    <checkpoints>/.reprieve/attempts-0.json      one file for each node of a job

`reprieve run` writes it. The next start reads it, on whichever machine or in whichever pod that is: the interval of
`every="auto"`, goodput, and the rule against endless restarts are about the run and not about a machine.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from reprieve.checkpoint.folder.paths import LEASE_FOLDER
from reprieve.launcher_protocol import LAUNCHER_SOCKET
from reprieve.run_state import RunState
from reprieve.storage.disk import Disk

log = logging.getLogger("reprieve")

VERSION = 1
_MAX_ATTEMPTS = 1000
LOSING_CAUSES = (RunState.FAILED, RunState.HUNG, RunState.LOST)
"""The causes that lose the work since the last checkpoint. A stop with a grace period loses none."""


@dataclass(slots=True)
class AttemptRecord:
    """One start of the command."""

    launched: float
    training: float | None = None
    """When the first step was completed."""
    kept_until: float | None = None
    """The training up to this moment is in a checkpoint."""
    ended: float | None = None
    cause: str = RunState.RUNNING
    """The run state that ended it; `RunState.RUNNING`: none did."""
    from_step: int | None = None
    to_step: int | None = None
    saved_step: int | None = None
    """The step of the newest checkpoint at its end."""
    run: str = ""
    """The name of the run, where it was given."""
    launcher: str = ""
    """The socket of the launcher: a random path, which tells its attempts from those of others."""
    updated: float = 0.0
    """When the launcher last wrote this record."""

    @property
    def key(self) -> tuple[str, float]:
        """What tells it from all other attempts."""
        return self.launcher, self.launched

    def end(self, at: float, cause: str) -> None:
        self.ended, self.cause = at, cause

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> AttemptRecord:
        """Fields that it does not know are ignored."""
        return cls(**{entry.name: content[entry.name] for entry in fields(cls) if entry.name in content})


def read(root: Path, *, node: int = 0, launcher: str | None = None) -> list[AttemptRecord]:
    """Return all attempts, the oldest first. One without an end was lost: its launcher was killed.

    `launcher`: the socket of the launcher whose attempt is running; default: that of this process.
    """
    running = os.environ.get(LAUNCHER_SOCKET, "") if launcher is None else launcher
    path = _path(root, node)
    try:
        content = json.loads(path.read_bytes())
        if _is_newer(content, path):
            return []
        attempts = [AttemptRecord.from_json(attempt) for attempt in content["attempts"]]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        log.warning("the record of earlier attempts in %s is not readable: %s", root, error)
        return []
    return [
        replace(attempt, ended=max(attempt.launched, attempt.updated), cause=RunState.LOST)
        if attempt.ended is None and attempt.launcher != running
        else attempt
        for attempt in attempts
    ]


def write(disk: Disk, root: Path, attempts: Sequence[AttemptRecord], *, node: int = 0) -> None:
    """Replace the record, but not that of a newer version. It need not survive a power cut."""
    path = _path(root, node)
    with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):  # not there, or not readable
        if _is_newer(json.loads(path.read_bytes()), path):
            return
    content = {"version": VERSION, "attempts": [asdict(attempt) for attempt in attempts[-_MAX_ATTEMPTS:]]}
    disk.replace_file(path, json.dumps(content, indent=1).encode() + b"\n", flush_folder=False)


def with_recorded_ends(attempts: Sequence[AttemptRecord], recorded: Sequence[AttemptRecord]) -> list[AttemptRecord]:
    """Return the attempts. One that was taken for lost is as its launcher recorded it, if that has recorded its end.

    A launcher may start while its predecessor still saves: it finds an attempt without an end, and the end later.
    """
    ended = {attempt.key: attempt for attempt in recorded if attempt.cause not in (RunState.LOST, RunState.RUNNING)}
    return [ended.get(attempt.key, attempt) if attempt.cause == RunState.LOST else attempt for attempt in attempts]


def losses(attempts: Sequence[AttemptRecord], causes: Sequence[str], now: float) -> tuple[int, float]:
    """Return how often work was lost to these causes, and in how many seconds of training."""
    count = sum(attempt.cause in causes for attempt in attempts)
    training = sum(
        max(0.0, (attempt.ended or now) - attempt.training) for attempt in attempts if attempt.training is not None
    )
    return count, training


def _is_newer(content: Any, path: Path) -> bool:
    version = content.get("version", VERSION)
    if version > VERSION:
        _log_newer(path, version)
        return True
    return False


@functools.cache  # once in a process, which writes it every few seconds
def _log_newer(path: Path, version: int) -> None:
    log.warning(
        "%s has version %s, and this Reprieve reads versions up to %d: it does not use earlier attempts, and records "
        "none. Use the Reprieve that wrote it, or a newer one",
        path,
        version,
        VERSION,
    )


def _path(root: Path, node: int) -> Path:
    return root / LEASE_FOLDER / f"attempts-{node}.json"
