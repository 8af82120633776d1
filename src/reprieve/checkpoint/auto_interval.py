"""Chooses the save interval for `every="auto"`, from the cost of a save and the rate at which work is lost.

Saving costs time, and so does repeating work that was not saved. With saves of C seconds, and M seconds between two
interruptions that lose work, the sum is smallest at an interval of about √(2CM) (Young 1974). Daly (2006) adds terms
that matter when C is not small against M. A stop with enough notice to save loses no work and does not count.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

from reprieve.checkpoint.folder.attempts import LOSING_CAUSES, AttemptRecord, losses

FIRST = timedelta(minutes=1)
"""The interval until the first save has shown what a save costs."""
_SHORTEST_S = 1.0
_LONGEST_S = 3600.0
_PRIOR_S = 86400.0
"""The time between interruptions to assume at first: one a day, as on demand. Spot machines soon correct it."""


def best_interval(cost_s: float, between_s: float) -> float:
    """Seconds from the end of a save to the start of the next.

    `cost_s`: how long a save blocks training. `between_s`: the time between two interruptions that lose work.
    """
    if cost_s >= 2 * between_s:
        return between_s
    ratio = cost_s / (2 * between_s)
    return math.sqrt(2 * cost_s * between_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost_s


@dataclass(slots=True)
class AutoInterval:
    """The best interval of one run, as far as its saves and interruptions show."""

    interruptions: int = 0
    trained_s: float = 0.0
    _cost_s: float | None = None

    def learn(self, attempts: Sequence[AttemptRecord], now: float) -> None:
        """Take the interruptions of the run so far into account."""
        self.interruptions, self.trained_s = losses(attempts, LOSING_CAUSES, now)

    def saved(self, cost_s: float) -> None:
        """Note how long a save blocked training: an estimate for the next one."""
        self._cost_s = cost_s if self._cost_s is None else 0.5 * self._cost_s + 0.5 * cost_s

    def interval(self, training_s: float) -> timedelta:
        """The time from a save to the next. `training_s`: how long this process has trained without interruption."""
        if self._cost_s is None:
            return FIRST
        between_s = (_PRIOR_S + self.trained_s + training_s) / (1 + self.interruptions)
        best = best_interval(max(self._cost_s, 1e-6), between_s)
        return timedelta(seconds=min(max(best, _SHORTEST_S), _LONGEST_S))
