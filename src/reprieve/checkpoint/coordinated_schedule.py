"""A schedule for all ranks of a job: every rank saves after the same step.

Steps and epochs are the same on all ranks. Time is not: when a save is due by time on rank 0, it requests one, and the
ranks agree on a step (`StepAgreement`).
"""

from __future__ import annotations

from reprieve.checkpoint.schedule import Schedule
from reprieve.ranks.group import Ranks
from reprieve.ranks.step_agreement import StepAgreement
from reprieve.ranks.step_protocol import SAVE


class TimedSaveRequests:
    """Rank 0's requests for saves that are due by time: one at a time, from the moment it is due until it is served."""

    def __init__(self, schedule: Schedule, agreement: StepAgreement, rank: int) -> None:
        self._schedule = schedule
        self._agreement = agreement
        self._enabled = rank == 0 and schedule.interval is not None
        self._pending = False

    def poll(self) -> None:
        """Request a save if one is due."""
        if self._enabled and not self._pending and self._schedule.due_by_time():
            self._pending = True
            self._agreement.request(SAVE)

    def served(self) -> None:
        """Note that the requested save was made."""
        self._pending = False


class CoordinatedSchedule:
    """When a save is due on all ranks. Every rank checks it after every step."""

    def __init__(self, schedule: Schedule, ranks: Ranks) -> None:
        self._schedule = schedule
        self._ranks = ranks
        self._agreement: StepAgreement | None = None
        self._requests: TimedSaveRequests | None = None

    def is_due(self, step: int, *, epoch_ended: bool) -> bool:
        """Whether all ranks save after this step."""
        if self._ranks.world_size == 1:
            return self._schedule.due(step, epoch_ended=epoch_ended)
        due = self._schedule.due_by_count(step, epoch_ended=epoch_ended)
        if self._schedule.interval is None:
            return due
        if self._agreement is None or self._requests is None:
            self._agreement = StepAgreement(self._ranks, completed=step - 1)
            self._requests = TimedSaveRequests(self._schedule, self._agreement, self._ranks.rank)
        self._requests.poll()
        while self._agreement.boundary(step) is not None:
            due = True
            self._requests.served()
        return due

    def close(self) -> None:
        if self._agreement is not None:
            self._agreement.close()
