"""The states of a run, shared by the training process, the launcher, the run record and the command line.

The values are part of the run record, the progress JSON and the output of `reprieve status`: they never change.
"""

from __future__ import annotations

from enum import Enum


class RunState(str, Enum):
    """What a run is doing, or how it ended. A `str` with that value."""

    STARTING = "starting"
    # What the training process reports
    TRAINING = "training"
    EVALUATING = "evaluating"
    SAVING = "saving"
    STOPPED = "stopped"
    """By a preemption or a pause. The training process does not know which."""
    # What the launcher records
    RUNNING = "running"
    STOPPING = "stopping"
    WAITING = "waiting to restart"
    PREEMPTED = "preempted"
    PAUSED = "paused"
    HUNG = "hung"
    LOST = "lost"
    """The launcher was killed and could not record how the run ended."""
    # Both
    FAILED = "failed"
    FINISHED = "finished"

    def __str__(self) -> str:
        return self.value
