"""How fast a session trains, and what holds it up: where the time that is left comes from.

Steps are timed on the training thread, with two additions each; once a second a mark is kept. Whoever asks looks at the
marks of about the last two minutes. Evaluations and saves are not step time. They are counted by kind, and what they
will still cost is added: without it, a run that evaluates for a third of its time would promise to end a third early.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median
from typing import NamedTuple

_MARK_S = 1.0
_MARKS = 120
"""Two minutes, or as many steps where a step takes longer than a second."""
_ACCIDENT = 3.0
"""A stretch that took so many times the usual is an accident (a recompilation, a stall) while it is rare. If it comes
again and again (every 8th batch waits for a DataLoader worker), it is part of the pace."""
_RARE = 30


class Mark(NamedTuple):
    """What was done by a moment of this session, since its first step."""

    seconds: float
    steps: int
    samples: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Interruption:
    """What one kind (saves, evaluations) has cost so far."""

    first: int
    """At which step it came first in this session, and last."""
    last: int
    times: int = 1
    seconds: float = 0.0
    every: int | None = None
    """How many steps lie between two, where somebody knows."""

    def seconds_per_step(self) -> float:
        """Spread over all steps. How often it comes: as somebody says; else as often as between the first and the last
        that were seen. Where only one was seen, as if it were the first since step 0: right for a fresh run, and too
        little rather than far too much for one that was resumed just before it."""
        if self.every:
            often = 1 / self.every
        elif self.times > 1:
            often = (self.times - 1) / (self.last - self.first)
        else:
            often = 1 / max(1, self.last)
        return self.seconds / self.times * often


class ThroughputMeter:
    """Of one session. Everything but `seconds_per_step` and `rates` belongs to the training thread."""

    def __init__(self, now: Callable[[], float], step: int) -> None:
        """`now`: a clock that never goes back. `step`: where the session begins."""
        self._now = now
        self.at = now()
        """When the last step ended."""
        self.current = step
        self.samples = self.tokens = 0
        """Up to the step that is told next."""
        self._began: float | None = None
        """When what is timed now began. None: nothing is timed. The first step is not: it compiles and warms up."""
        self._seconds = 0.0
        self._steps = 0
        self._next_mark = 0.0
        self._marks: tuple[Mark, ...] = ()
        """Replaced, never changed: another thread reads it without a lock."""
        self._interruptions: dict[str, Interruption] = {}
        self._depth = 0

    def step(self, step: int) -> None:
        """Step `step` is completed."""
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

    def interrupted(self) -> float:
        """What comes now is no part of a step. When it began, for `went_on`."""
        now = self._now()
        self._depth += 1
        if self._began is not None:
            self._seconds += now - self._began
            self._began = None
        return now

    def went_on(self, what: str, began: float, every: int | None = None) -> None:
        """Steps follow again. One interruption inside another belongs to the outer one."""
        now = self._now()
        self._depth -= 1
        if self._depth:
            return
        if self._marks:
            self._began = now
        known = self._interruptions.get(what)
        if known is None:
            known = Interruption(self.current, self.current, seconds=now - began)
        else:
            again = self.current != known.last  # else a second one at the same place: a longer one
            known = replace(known, last=self.current, times=known.times + again, seconds=known.seconds + now - began)
        self._interruptions = {**self._interruptions, what: replace(known, every=every or known.every)}

    def _mark(self) -> None:
        self._next_mark = self._seconds + _MARK_S
        mark = Mark(self._seconds, self._steps, self.samples, self.tokens)
        self._marks = (*self._marks[-_MARKS:], mark)

    # Asked from other threads

    def seconds_per_step(self) -> float | None:
        """Of what is left, interruptions included."""
        marks = self._marks
        stretches = [
            (after.seconds - before.seconds, after.steps - before.steps)
            for before, after in pairwise(marks)
            if after.steps > before.steps
        ]
        if not stretches:
            return None
        limit = _ACCIDENT * median(seconds / steps for seconds, steps in stretches)
        usual = [one for one in stretches if one[0] <= limit * one[1]]
        if len(stretches) - len(usual) <= max(1, len(stretches) // _RARE):
            stretches = usual
        per_step = sum(seconds for seconds, _ in stretches) / sum(steps for _, steps in stretches)
        return per_step + sum(one.seconds_per_step() for one in self._interruptions.values())

    def rates(self) -> tuple[float | None, float | None]:
        """Samples and tokens a second, while it trains."""
        marks = self._marks
        if len(marks) < 2 or marks[-1].seconds <= marks[0].seconds:
            return None, None
        first, last = marks[0], marks[-1]
        seconds = last.seconds - first.seconds
        samples, tokens = last.samples - first.samples, last.tokens - first.tokens
        return samples / seconds if samples else None, tokens / seconds if tokens else None
