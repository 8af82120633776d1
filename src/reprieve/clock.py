"""Time, as something that can be handed in: schedules and heartbeats are tested without waiting."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """What the package asks of time."""

    def time(self) -> float:
        """Seconds since the epoch: for records that people and other machines read."""

    def monotonic(self) -> float:
        """Seconds that never go back: for everything that is measured or due."""

    def sleep(self, seconds: float) -> None:
        """Wait."""


class SystemClock:
    """The real one."""

    def time(self) -> float:
        return time.time()

    def monotonic(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)
