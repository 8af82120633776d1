"""The schedule of periodic saves: by steps, by epochs, by time, any of them together, or never."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import timedelta

from reprieve.checkpoint.auto_interval import FIRST, AutoInterval
from reprieve.clock import Clock, SystemClock
from reprieve.errors import ConfigError
from reprieve.units import parse_duration

_STEPS = re.compile(r"(\d+)(?:\s*steps?)?")

Every = int | str | timedelta | Iterable["int | str | timedelta"] | None


@dataclass(slots=True)
class Schedule:
    """When a save is due on this rank. The training loop checks it after every step and notes every save in it."""

    steps: int | None = None
    interval: timedelta | None = None
    epoch: bool = False
    auto: AutoInterval | None = None
    clock: Clock = field(default_factory=SystemClock)
    _started_at: float = field(init=False)
    _saved_at: float = field(init=False)
    _saved_step: int | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self._started_at = self._saved_at = self.clock.monotonic()

    @classmethod
    def of(cls, every: Every, clock: Clock | None = None) -> Schedule:
        """Parse `500`, `"500 steps"`, `"epoch"`, `"10m"`, a timedelta, `"auto"`, a list of them, or None for never."""
        schedule = cls(clock=clock or SystemClock())
        parts = [every] if isinstance(every, int | float | str | timedelta) else list(every or ())
        counts: list[int] = []
        intervals: list[timedelta] = []
        for part in parts:
            if not isinstance(part, int | str | timedelta) or isinstance(part, bool):
                raise ConfigError(f"every={part!r}: write 500, '500 steps', 'epoch', '10m', 'auto' or 'never'")
            if isinstance(part, timedelta):
                intervals.append(parse_duration(part))
            elif isinstance(part, int) or _STEPS.fullmatch(part):
                steps = part if isinstance(part, int) else int(part.split("s")[0])
                if steps < 1:
                    raise ConfigError(f"every={part!r}: write at least 1 step, or 'never'")
                counts.append(steps)
            elif part == "epoch":
                schedule.epoch = True
            elif part == "auto":
                schedule.auto = AutoInterval()
                intervals.append(FIRST)
            elif part != "never":
                try:
                    intervals.append(parse_duration(part))
                except ConfigError:
                    raise ConfigError(
                        f"every={part!r} is not understood: write 500, '500 steps', 'epoch', '10m', 'auto' or 'never'"
                    ) from None
        if len(counts) > 1 or len(intervals) > 1:
            raise ConfigError(f"every={parts!r}: write at most one number of steps and one duration ('auto' is one)")
        schedule.steps, schedule.interval = next(iter(counts), None), next(iter(intervals), None)
        return schedule

    @property
    def by_count(self) -> bool:
        """Whether a count of steps or epochs can make a save due."""
        return self.steps is not None or self.epoch

    def due(self, step: int, *, epoch_ended: bool = False) -> bool:
        """Whether a save is due after this step: never twice for the same step."""
        return self.due_by_count(step, epoch_ended=epoch_ended) or (step != self._saved_step and self.due_by_time())

    def due_by_count(self, step: int, *, epoch_ended: bool = False) -> bool:
        """Whether a save is due by steps and epochs alone, which are the same on every rank."""
        if step == self._saved_step:
            return False
        return (self.epoch and epoch_ended) or (self.steps is not None and step > 0 and step % self.steps == 0)

    def due_by_time(self) -> bool:
        """Whether a save is due by the clock alone, which no two ranks read at the same moment."""
        return self.interval is not None and self.clock.monotonic() - self._saved_at >= self.interval.total_seconds()

    def saved(self, step: int, cost: timedelta | None = None) -> None:
        """Note a save of this step. `cost`: how long it blocked training."""
        self._saved_step = step
        self._saved_at = self.clock.monotonic()
        if self.auto is not None and cost is not None:
            self.auto.saved(cost.total_seconds())
            self.interval = self.auto.interval(self._saved_at - self._started_at)
