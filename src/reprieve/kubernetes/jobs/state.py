"""The states of a TrainJob, in one word."""

from __future__ import annotations

from datetime import timedelta
from enum import Enum

STALE_AFTER = timedelta(seconds=90)
"""Data of a running job that is older is marked as stale: the operator reads it every 60 s at least."""


class JobState(str, Enum):
    """The states of a TrainJob. Their names are part of the API: the operator writes them."""

    PENDING = "Pending"
    WAITING_FOR_PEERS = "WaitingForPeers"
    STARTING = "Starting"
    RUNNING = "Running"
    SAVING = "Saving"
    PREEMPTED = "Preempted"
    PAUSED = "Paused"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    UNKNOWN = "Unknown"

    def __str__(self) -> str:
        return self.value

    @property
    def is_end(self) -> bool:
        return self in (JobState.SUCCEEDED, JobState.FAILED)
