"""Measures how fast a session trains, and what interrupts it: the basis of the remaining time.

The training thread times each step with two additions, and keeps a mark once a second. Readers use the marks of about
the last two minutes. Evaluations and saves are not step time: they are counted by kind, and their expected cost is
added to the remaining time. Without it, the estimate of a run that evaluates for a third of its time would be a third
too short.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median
from typing import NamedTuple

_MARK_INTERVAL_S = 1.0
_MAX_MARKS = 120
"""Two minutes, or this many steps where a step takes longer than a second."""
_OUTLIER = 3.0
"""An interval that took this many times the median is an outlier (a recompilation, a stall) if it is rare. A frequent
one (every 8th batch waits for a DataLoader worker) is part of the throughput."""
_RARE = 30
"""At most one interval in this many is rare."""


class Mark(NamedTuple):
    """What was trained in this session up to a moment, since its first step."""

    seconds: float
    steps: int
    samples: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Interruption:
    """The cost of one kind of interruption (saves, evaluations) so far."""

    first: int
    """The step of the first one in this session; `last`: of the last one."""
    last: int
    times: int = 1
    seconds: float = 0.0
    every: int | None = None
    """The number of steps between two, where that is known."""

    def seconds_per_step(self) -> float:
        """Return the cost spread over all steps.

        The frequency is the known one, else that between the first and the last interruption. A single interruption
        counts as the first since step 0: right for a new run, and too little rather than far too much for a run that
        was resumed just before it.
        """
        if self.every:
            per_step = 1 / self.every
        elif self.times > 1:
            per_step = (self.times - 1) / (self.last - self.first)
        else:
            per_step = 1 / max(1, self.last)
        return self.seconds / self.times * per_step


class ThroughputMeter:
    """The throughput of one session. Only `seconds_per_step` and `rates` may be called off the training thread."""

    def __init__(self, now: Callable[[], float], step: int) -> None:
        """`now`: a monotonic clock. `step`: where the session begins."""
        self._now = now
        self.at = now()
        """When the last step ended."""
        self.current = step
        self.samples = self.tokens = 0
        """Up to the next `step`."""
        self._began: float | None = None
        """When the timed interval began; None: nothing is timed. The first step is not: it compiles and warms up."""
        self._seconds = 0.0
        self._steps = 0
        self._next_mark = 0.0
        self._marks: tuple[Mark, ...] = ()
        """Replaced, never changed: other threads read it without a lock."""
        self._interruptions: dict[str, Interruption] = {}
        self._depth = 0

    def step(self, step: int) -> None:
        """Count the completed step `step`."""
        now = self._now()
        if self._began is not None:
            self._seconds += now - self._began
            self._steps += step - self.current
            if self._seconds >= self._next_mark:
                self._mark()
        elif not self._marks:
            self._mark()
        if not self._depth:
            self._began = now
        self.at = now
        self.current = step

    def begin_interruption(self) -> float:
        """Stop timing steps. Returns the time, for `end_interruption`."""
        now = self._now()
        self._depth += 1
        if self._began is not None:
            self._seconds += now - self._began
            self._began = None
        return now

    def end_interruption(self, kind: str, began: float, every: int | None = None) -> None:
        """Time steps again. An interruption inside another belongs to the outer one."""
        now = self._now()
        self._depth -= 1
        if self._depth:
            return
        if self._marks:
            self._began = now
        known = self._interruptions.get(kind)
        if known is None:
            known = Interruption(self.current, self.current, seconds=now - began)
        else:
            is_new = self.current != known.last  # else it is a part of the last one, at the same step
            known = replace(known, last=self.current, times=known.times + is_new, seconds=known.seconds + now - began)
        self._interruptions = {**self._interruptions, kind: replace(known, every=every or known.every)}

    def _mark(self) -> None:
        self._next_mark = self._seconds + _MARK_INTERVAL_S
        mark = Mark(self._seconds, self._steps, self.samples, self.tokens)
        self._marks = (*self._marks[-_MAX_MARKS:], mark)

    # On any thread

    def seconds_per_step(self) -> float | None:
        """Return the expected seconds per step, interruptions included; None: unknown."""
        marks = self._marks
        intervals = [
            (after.seconds - before.seconds, after.steps - before.steps)
            for before, after in pairwise(marks)
            if after.steps > before.steps
        ]
        if not intervals:
            return None
        limit = _OUTLIER * median(seconds / steps for seconds, steps in intervals)
        usual = [(seconds, steps) for seconds, steps in intervals if seconds <= limit * steps]
        if len(intervals) - len(usual) <= max(1, len(intervals) // _RARE):
            intervals = usual
        per_step = sum(seconds for seconds, _ in intervals) / sum(steps for _, steps in intervals)
        return per_step + sum(kind.seconds_per_step() for kind in self._interruptions.values())

    def rates(self) -> tuple[float | None, float | None]:
        """Return samples and tokens per second of training; None: unknown."""
        marks = self._marks
        if len(marks) < 2 or marks[-1].seconds <= marks[0].seconds:
            return None, None
        first, last = marks[0], marks[-1]
        seconds = last.seconds - first.seconds
        samples, tokens = last.samples - first.samples, last.tokens - first.tokens
        return samples / seconds if samples else None, tokens / seconds if tokens else None
