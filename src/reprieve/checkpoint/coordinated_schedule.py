"""When a schedule says so for all ranks of a job: at one and the same step."""

from __future__ import annotations

from reprieve.checkpoint.schedule import Schedule
from reprieve.ranks.group import Ranks
from reprieve.ranks.step_agreement import StepAgreement
from reprieve.ranks.step_protocol import SAVE


class CoordinatedSchedule:
    """Steps and epochs are the same on all ranks. Time is not: when it is up on rank 0, one step is agreed on."""

    def __init__(self, schedule: Schedule, ranks: Ranks) -> None:
        self._schedule = schedule
        self._ranks = ranks
        self._common: StepAgreement | None = None
        self._asked = False

    def at(self, step: int, *, epoch_ended: bool) -> bool:
        """Asked after every step."""
        if self._ranks.world_size == 1:
            return self._schedule.due(step, epoch_ended=epoch_ended)
        due = self._schedule.due_at(step, epoch_ended=epoch_ended)
        if self._schedule.interval is None:
            return due
        if self._common is None:
            self._common = StepAgreement(self._ranks, completed=step - 1)
        if self._ranks.rank == 0 and not self._asked and self._schedule.time_is_up():
            self._common.request(SAVE)
            self._asked = True
        while self._common.boundary(step) is not None:
            due, self._asked = True, False
        return due

    def close(self) -> None:
        if self._common is not None:
            self._common.close()
