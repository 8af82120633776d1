"""Whether a run that failed is started again, and when."""

from __future__ import annotations

import random
from dataclasses import dataclass

_FIRST_WAIT_S = 1.0
_LONGEST_WAIT_S = 60.0
_STUCK = 3
"""So many attempts in a row that end at one step: the next would, too."""


@dataclass(frozen=True, slots=True)
class Retry:
    """Start it again after so many seconds."""

    wait_s: float


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Do not."""

    reason: str


class RestartPolicy:
    """Of one run, by the failures so far. Preemptions are none."""

    def __init__(self, allowed: int, jitter: random.Random | None = None) -> None:
        self._allowed = allowed
        self._jitter = jitter or random.Random()  # noqa: S311 - spreads load, hides nothing
        self.used = 0
        self._furthest = -1
        self._in_a_row = 0
        """Failures since the run last got further."""

    def after_failure(self, step: int | None) -> Retry | GiveUp:
        """`step`: how far the attempt got; None: it did not say."""
        if step is not None and step > self._furthest:
            self._furthest, self._in_a_row = step, 0
        self._in_a_row += 1
        if self._allowed and step is not None and self._in_a_row >= _STUCK:
            return GiveUp(
                f"no progress: {self._in_a_row} attempts in a row ended at step {self._furthest} or before. "
                "Starting it again would not help"
            )
        if self.used >= self._allowed:
            return GiveUp(f"failed {self.used + 1} times, {self._allowed} restarts allowed" if self._allowed else "")
        self.used += 1
        wait_s = min(_LONGEST_WAIT_S, _FIRST_WAIT_S * 2 ** min(self._in_a_row - 1, 16))
        return Retry(wait_s * self._jitter.uniform(0.75, 1.25))
