"""The clock that schedules, heartbeats and time limits use. Tests pass a fake one, so that they need not wait."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Time of day, monotonic time and waiting."""

    def time(self) -> float:
        """Return the seconds since the epoch, for records that people and other machines read."""

    def monotonic(self) -> float:
        """Return seconds that never go back, for durations and deadlines."""

    def sleep(self, seconds: float) -> None:
        """Wait for so many seconds."""


class SystemClock:
    """The system's clock."""

    def time(self) -> float:
        return time.time()

    def monotonic(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)
