"""The termination log: what Kubernetes keeps of a terminated container and shows as the reason.

It is written when the run has ended, and after a stop, too: a preempted pod would otherwise leave nothing behind. It is
always JSON. Rank 0 writes its progress; the launcher adds its exit message, and writes both where no rank 0 has: on
other nodes, before the training begins, and when it had to kill the job.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from reprieve.progress.formats import progress_json
from reprieve.progress.snapshot import Progress
from reprieve.run_state import RunState

MAX_BYTES = 4096
"""Kubernetes truncates longer logs, and a truncated JSON object is useless."""


def path(env: Mapping[str, str] = os.environ) -> Path:
    return Path(env.get("REPRIEVE_TERMINATION_LOG") or "/dev/termination-log")


class TerminationSink:
    """Writes the termination log if the file exists: the kubelet creates it."""

    every_s = 1.0

    def __init__(self, log: str | Path) -> None:
        self._path = Path(log)
        self._written = False

    @property
    def name(self) -> str:
        return f"the termination log {self._path}"

    def update(self, progress: Progress) -> None:
        """Write the end of the run at once: the process may be killed before `close`."""
        if progress.ended and not self._written:
            self._write(progress)

    def close(self, progress: Progress) -> None:
        self._write(progress)

    def _write(self, progress: Progress) -> None:
        if self._path.exists():
            self._path.write_bytes(message(progress))  # in place: the file is a mount
        self._written = True


def message(progress: Progress) -> bytes:
    """Return as much of the progress as fits."""
    return _fitting(_content(progress))


def add_message(text: str, state: RunState, step: int, env: Mapping[str, str] = os.environ) -> None:
    """Add the message about how the run ended to the progress in the log. Where there is none, write that it ended in
    this state, after this step."""
    log = path(env)
    with contextlib.suppress(OSError):
        if log.exists():
            content = _progress_in(log) or _content(Progress(at=time.time(), state=state, step=step))
            log.write_bytes(_fitting({**content, "message": text}))


def _content(progress: Progress) -> dict[str, Any]:
    """The metrics, the step also by its name in the progress file, and how long the last save took."""
    found = progress_json.for_http(progress)
    found["checkpointing"]["lastSaveDuration"] = progress_json.save_duration(progress)
    return {**found, "step": progress.step}


def _progress_in(log: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(log.read_bytes())
    except (OSError, ValueError):
        return None
    is_progress = isinstance(found, dict) and {"trainMetrics", "evalMetrics", "checkpointing"} <= found.keys()
    return found if is_progress else None


def _fitting(content: dict[str, Any]) -> bytes:
    data = b""
    for reduced in _reductions(content):
        data = progress_json.dumps(reduced)
        if len(data) <= MAX_BYTES:
            break
    return data


def _reductions(content: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield ever smaller versions: metrics with names of the user are dropped first, then texts are shortened."""
    yield content
    for most in (16, 4, 0):
        for metrics in ("trainMetrics", "evalMetrics"):
            content = {**content, metrics: dict(list(content[metrics].items())[:most])}
        yield content
    for most in (100, 0):
        for text in ("reason", "message"):
            if content.get(text):
                content = {**content, text: content[text][:most]}
        yield content
    yield {**content, "checkpointing": {**content["checkpointing"], "latestCheckpoint": None}}
