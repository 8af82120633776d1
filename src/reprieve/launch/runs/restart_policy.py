"""Decides whether and when to restart a run that failed, and whether to start one that others restart."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from reprieve.checkpoint.folder.attempts import AttemptRecord
from reprieve.run_state import RunState

_MIN_DELAY_S = 1.0
_MAX_DELAY_S = 60.0
_MAX_WITHOUT_PROGRESS = 3
"""After this many attempts in a row that end at the same step, the next would, too."""
_MAX_STARTS_WITHOUT_PROGRESS = 5
"""The same for starts by a cluster. More, because they may also fail for reasons of the cluster."""


@dataclass(frozen=True, slots=True)
class Retry:
    """Restart the run after a delay."""

    wait_s: float


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Do not restart the run."""

    reason: str


def find_endless_restarts(attempts: Sequence[AttemptRecord], run: str) -> str | None:
    """Return why a further start of this run would not help; None: it may.

    A cluster restarts preempted jobs without limit. If one node crashes again and again, and others report that they
    were stopped by it, the cluster may take each crash for a preemption.
    """
    furthest, in_a_row = 0, 0
    for attempt in attempts:
        if attempt.run != run:
            continue
        if (saved := attempt.saved_step or 0) > furthest:
            furthest, in_a_row = saved, 0
        if attempt.cause in (RunState.FAILED, RunState.HUNG):
            in_a_row += 1
    if in_a_row < _MAX_STARTS_WITHOUT_PROGRESS:
        return None
    return (
        f"no progress: {in_a_row} starts of run {run!r} in a row failed, and none saved a step after {furthest}. See "
        "the logs of its earlier pods, fix the cause and submit a new job; it resumes from the newest checkpoint"
    )


class RestartPolicy:
    """The policy for one run, which knows its failures so far. Preemptions are not failures."""

    def __init__(self, allowed: int, jitter: random.Random | None = None) -> None:
        self._allowed = allowed
        self._jitter = jitter or random.Random()  # noqa: S311 - not for security
        self.used = 0
        self._furthest = -1
        self._in_a_row = 0
        """Failures since the run last made progress."""

    def after_failure(self, step: int | None) -> Retry | GiveUp:
        """Decide what follows a failure. `step`: the last step of the attempt; None: unknown."""
        if step is not None and step > self._furthest:
            self._furthest, self._in_a_row = step, 0
        self._in_a_row += 1
        if self._allowed and step is not None and self._in_a_row >= _MAX_WITHOUT_PROGRESS:
            return GiveUp(
                f"no progress: {self._in_a_row} attempts in a row ended at step {self._furthest} or before. "
                "Restarting would not help"
            )
        if self.used >= self._allowed:
            return GiveUp(f"failed {self.used + 1} times, {self._allowed} restarts allowed" if self._allowed else "")
        self.used += 1
        wait_s = min(_MAX_DELAY_S, _MIN_DELAY_S * 2 ** min(self._in_a_row - 1, 16))
        return Retry(wait_s * self._jitter.uniform(0.75, 1.25))
