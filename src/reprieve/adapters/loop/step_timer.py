"""Measures how long steps take, to compare the running one with a deadline."""

from __future__ import annotations

import time


class StepTimer:
    """A timer of the steps of this process."""

    def __init__(self) -> None:
        self.typical_s = 0.0
        """A moving average in which recent steps count more."""
        self._began: float | None = None

    def step_ended(self) -> float:
        """Record the end of a step. Returns the typical duration."""
        now = time.monotonic()
        if self._began is not None:
            elapsed_s = now - self._began
            self.typical_s = elapsed_s if not self.typical_s else 0.8 * self.typical_s + 0.2 * elapsed_s
        self._began = now
        return self.typical_s

    def interrupted(self) -> None:
        """Do not count what comes now (an evaluation, a save) as part of a step."""
        self._began = None

    def remaining_s(self) -> float:
        """Return how long the running step will still take, if it is typical."""
        if self._began is None:
            return self.typical_s
        return max(0.0, self._began + self.typical_s - time.monotonic())
