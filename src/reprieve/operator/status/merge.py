"""What a report changes in the progress that is known: newer values replace older ones, and counters never fall."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from datetime import datetime
from typing import Any

from reprieve.kubernetes.jobs.reports import Report
from reprieve.kubernetes.jobs.training_progress import Checkpoints, TrainingProgress
from reprieve.run_state import RunState

_POSITION = ("step", "epoch", "current_epoch", "percent_complete", "last_update_time")
_NEWS = ("step", "epoch")
_OF_THE_START = ("resumed_from", "resumed_from_step", "saved")
"""About this start of the job: an unknown value replaces that of an earlier start."""
_OF_THIS_SAVE = ("saving_step", "saving_percentage")


def with_report(progress: TrainingProgress, report: Report, now: datetime) -> TrainingProgress:
    """Return the progress with what a report says."""
    reported = report.progress
    kept = {"state", "reason", "checkpointing", "pod"}
    if progress.step is not None and _has_not_resumed(reported):
        kept.update(_POSITION)  # Its step 0 is not where the job is.
    changes = {
        name: value
        for name, value in _values(reported)
        if name not in kept and (value is not None or name in _OF_THE_START)
    }
    if reported.last_update_time is None and "last_update_time" not in kept:
        changes["last_update_time"] = _own_time(progress, reported, now)
    changes["restarts"] = _highest(progress.restarts, reported.restarts)
    checkpointing = _checkpoints(progress.checkpointing, reported.checkpointing)
    return replace(progress, **changes, pod=report.pod, checkpointing=checkpointing)


def _has_not_resumed(reported: TrainingProgress) -> bool:
    """Whether the start has not restored its checkpoint yet, or has ended before it could: the launcher, which then
    writes the termination message, knows of no step."""
    if reported.state == RunState.STARTING:
        return True
    return reported.state in (RunState.STOPPED, RunState.FAILED) and not reported.step and reported.saved is None


def _checkpoints(known: Checkpoints, reported: Checkpoints) -> Checkpoints:
    changes = {
        name: value for name, value in _values(reported) if value is not None or name in (*_OF_THIS_SAVE, "error")
    }
    changes["checkpoints_created"] = _highest(known.checkpoints_created, reported.checkpoints_created)
    return replace(known, **changes)


def _own_time(progress: TrainingProgress, reported: TrainingProgress, now: datetime) -> datetime | None:
    """The time of a report whose own cannot be right: now if there is news in it, else that of the report before."""
    found = {name: getattr(reported, name) for name in _NEWS}
    is_news = progress.last_update_time is None or any(
        value is not None and value != getattr(progress, name) for name, value in found.items()
    )
    return now.replace(microsecond=0) if is_news else progress.last_update_time


def _highest(known: int | None, reported: int | None) -> int | None:
    return max((each for each in (known, reported) if each is not None), default=None)


def _values(found: Any) -> list[tuple[str, Any]]:
    return [(field.name, getattr(found, field.name)) for field in dataclasses.fields(found)]
