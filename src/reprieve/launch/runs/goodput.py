"""Where the time of a run went: what it trained, and what each interruption took. Adds up to the wall time.

    launched ── lost to what ended the one before ──► training ── trained ──► kept until ── lost to its end ──► ended

What an attempt trained counts up to the moment that its newest checkpoint holds; what it did after that, the next one
does again. The time until the next is launched is lost to the same cause, and so is its start. All times are seconds
since the epoch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from typing import Any

from reprieve.run_state import RunState

FIRST_START = "first start"


@dataclass(slots=True)
class AttemptRecord:
    """One start of the command."""

    launched: float
    training: float | None = None
    """When the first step was seen."""
    kept_until: float | None = None
    """What was done up to then is in a checkpoint."""
    ended: float | None = None
    cause: str = RunState.RUNNING
    """What ended it."""
    from_step: int | None = None
    to_step: int | None = None

    def end(self, at: float, cause: str) -> None:
        self.ended, self.cause = at, cause


@dataclass(frozen=True, slots=True)
class TimeSpent:
    """Seconds."""

    wall: float
    trained: float
    lost: dict[str, float]
    """By cause; the first start is one."""

    @property
    def goodput(self) -> float:
        return self.trained / self.wall if self.wall else 0.0

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "goodput": self.goodput}


def time_spent(attempts: Sequence[AttemptRecord], now: float) -> TimeSpent:
    """Of a run. While its last attempt runs, all that it has done counts as trained: it may still be saved."""
    if not attempts:
        return TimeSpent(0.0, 0.0, {})
    begin = at = attempts[0].launched
    trained, lost, before = 0.0, dict[str, float](), FIRST_START

    def until(moment: float | None, cause: str | None) -> None:
        """The time from where we are to there went to a cause; None: it was trained. Clocks are set now and then, and
        those of two processes differ: nobody goes back."""
        nonlocal at, trained
        seconds = max(0.0, (at if moment is None else moment) - at)
        at += seconds
        if cause is None:
            trained += seconds
        elif seconds:
            lost[cause] = lost.get(cause, 0.0) + seconds

    for one, following in zip_longest(attempts, attempts[1:]):
        ended = one.ended
        if ended is None:  # running; or its launcher was killed, and knows nothing of its end
            ended = now if following is None else following.launched
        until(one.launched, before)
        until(min(ended if one.training is None else one.training, ended), before)
        if one.training is not None:
            kept = ended if one.ended is None else one.kept_until
            until(None if kept is None else min(kept, ended), None)
        until(ended, one.cause)
        before = one.cause
    if before not in (RunState.FINISHED, RunState.RUNNING):
        until(now, before)
    return TimeSpent(at - begin, trained, lost)


def losses(attempts: Sequence[AttemptRecord], causes: Sequence[str], now: float) -> tuple[int, float]:
    """How often work was lost to these causes, and in how much training."""
    count = sum(one.cause in causes for one in attempts)
    training = sum(max(0.0, (one.ended or now) - one.training) for one in attempts if one.training is not None)
    return count, training
