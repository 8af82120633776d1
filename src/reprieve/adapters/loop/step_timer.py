"""How long a step takes, and how long a save: what a deadline is held against."""

from __future__ import annotations

import time


class StepTimer:
    """Of the steps of this process."""

    def __init__(self) -> None:
        self.typical_s = 0.0
        """A moving average: recent steps count more."""
        self._began: float | None = None

    def step_ended(self) -> float:
        """How long a step takes."""
        now = time.monotonic()
        if self._began is not None:
            took = now - self._began
            self.typical_s = took if not self.typical_s else 0.8 * self.typical_s + 0.2 * took
        self._began = now
        return self.typical_s

    def interrupted(self) -> None:
        """What comes now (an evaluation, a save) is not part of a step."""
        self._began = None

    def rest_s(self) -> float:
        """How long the step that is running will still take, if it is like the others."""
        if self._began is None:
            return self.typical_s
        return max(0.0, self._began + self.typical_s - time.monotonic())
