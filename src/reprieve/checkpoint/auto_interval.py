"""How often to save, where the user leaves it to us: from what a save costs, and how often work is lost.

Saving costs time, and so does doing again what was not saved. With saves of C seconds and M seconds between two
interruptions that lose work the sum is least at an interval of about √(2CM) (Young 1974); Daly (2006) has more terms,
which matter when C is not small against M. A stop that is told in time loses nothing and counts for nothing here.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

FIRST = timedelta(minutes=1)
"""Until a save was made, nobody knows what one costs."""
_SHORTEST_S = 1.0
_LONGEST_S = 3600.0
_BEFORE_S = 86400.0
"""What is assumed before anything was seen: one interruption a day, as on demand; spot machines soon correct it."""

INTERRUPTIONS = "REPRIEVE_INTERRUPTIONS"
"""`3/7200`: how often work was lost, in how many seconds of training. The launcher knows, from the run record."""


def best_interval(cost_s: float, between_s: float) -> float:
    """Seconds between the end of one save and the begin of the next."""
    if cost_s >= 2 * between_s:
        return between_s
    part = cost_s / (2 * between_s)
    return math.sqrt(2 * cost_s * between_s) * (1 + math.sqrt(part) / 3 + part / 9) - cost_s


@dataclass(slots=True)
class AutoInterval:
    """The interval of one run, as it is known now."""

    interruptions: int = 0
    trained_s: float = 0.0
    _cost_s: float | None = None

    @classmethod
    def of_environment(cls, env: Mapping[str, str] = os.environ) -> AutoInterval:
        count, _, trained = env.get(INTERRUPTIONS, "").partition("/")
        try:
            return cls(int(count), float(trained))
        except ValueError:
            return cls()

    def saved(self, cost_s: float) -> None:
        """A save has held training up for so long. The next will, about."""
        self._cost_s = cost_s if self._cost_s is None else 0.5 * self._cost_s + 0.5 * cost_s

    def interval(self, training_s: float) -> timedelta:
        """`training_s`: how long this process has trained, without an interruption."""
        if self._cost_s is None:
            return FIRST
        between_s = (_BEFORE_S + self.trained_s + training_s) / (1 + self.interruptions)
        best = best_interval(max(self._cost_s, 1e-6), between_s)
        return timedelta(seconds=min(max(best, _SHORTEST_S), _LONGEST_S))
