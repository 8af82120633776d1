"""Accounts for the wall time of a run: training that was kept, and losses by cause. The parts add up to the wall time.

    launched ── lost to the previous cause ──► training ── trained ──► kept until ── lost to its own cause ──► ended

The training of an attempt counts up to the moment that its newest checkpoint holds; the next attempt repeats the rest.
The time until the next attempt trains is lost to the same cause. All times are seconds since the epoch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from typing import Any

from reprieve.checkpoint.folder.attempts import AttemptRecord
from reprieve.run_state import RunState

FIRST_START = "first start"


@dataclass(frozen=True, slots=True)
class TimeSpent:
    """How the wall time of a run was spent, in seconds."""

    wall: float
    trained: float
    lost: dict[str, float]
    """By cause; the first start is one of them."""

    @property
    def goodput(self) -> float:
        return self.trained / self.wall if self.wall else 0.0

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "goodput": self.goodput}


def time_spent(attempts: Sequence[AttemptRecord], now: float) -> TimeSpent:
    """Account for the time of a run. A running attempt counts as trained: its work may still be saved."""
    if not attempts:
        return TimeSpent(0.0, 0.0, {})
    begin = at = attempts[0].launched
    trained, lost, previous_cause = 0.0, dict[str, float](), FIRST_START

    def spend_until(until: float | None, cause: str | None) -> None:
        """Attribute the time up to `until` to a cause; None: to training.

        Clocks get adjusted, and those of two processes differ: time never goes back here.
        """
        nonlocal at, trained
        seconds = max(0.0, (at if until is None else until) - at)
        at += seconds
        if cause is None:
            trained += seconds
        elif seconds:
            lost[cause] = lost.get(cause, 0.0) + seconds

    for attempt, following in zip_longest(attempts, attempts[1:]):
        ended = attempt.ended
        if ended is None:  # it runs, or its launcher was killed and did not record the end
            ended = now if following is None else following.launched
        spend_until(attempt.launched, previous_cause)
        spend_until(min(ended if attempt.training is None else attempt.training, ended), previous_cause)
        if attempt.training is not None:
            kept = ended if attempt.ended is None else attempt.kept_until
            spend_until(None if kept is None else min(kept, ended), None)
        spend_until(ended, attempt.cause)
        previous_cause = attempt.cause
    if previous_cause not in (RunState.FINISHED, RunState.RUNNING):
        spend_until(now, previous_cause)
    return TimeSpent(at - begin, trained, lost)
