"""What ranks exchange at a stop, and rank 0's decision about the last save.

`GracefulShutdown` sends these through `Ranks.agree`. The decisions are pure functions of what is known at that time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from reprieve.preemption.stop_listener import ANOTHER_RANK


@dataclass(frozen=True, slots=True)
class RankDeadline:
    """One rank's stop request. Clocks differ between machines, so it has the remaining time and no point in time."""

    remaining_s: float | None
    """None: no deadline is known."""
    reason: str
    certain: bool

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, message: Mapping[str, Any]) -> RankDeadline:
        return cls(**message)


def common_deadline(deadlines: Sequence[RankDeadline]) -> RankDeadline:
    """Return the earliest deadline, with the reason of a rank that was stopped from outside."""
    earliest = min(deadlines, key=lambda rank: float("inf") if rank.remaining_s is None else rank.remaining_s)
    reasons = (rank.reason for rank in (earliest, *deadlines) if rank.reason != ANOTHER_RANK)
    return dataclasses.replace(earliest, reason=next(reasons, ANOTHER_RANK))


@dataclass(frozen=True, slots=True, kw_only=True)
class StopPlan:
    """What happens to the running save and to the current step."""

    save: bool
    """Save the current step."""
    abort_running: bool = False
    """Give up the running periodic save, to have time for the current step."""
    no_time: bool = False
    """The current step is not saved: there is only time to finish the running save."""
    save_s: float | None = None
    """How long a save takes; None: unknown."""
    running_s: float | None = None
    """How long the running save still takes."""

    @property
    def needed_s(self) -> float | None:
        """How long all saves take; None: unknown."""
        return None if self.save_s is None else self.save_s + (self.running_s or 0.0)

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, message: Mapping[str, Any]) -> StopPlan:
        return cls(**message)


def plan_last_save(
    *, is_new: bool, is_saving: bool, running_s: float | None, save_s: float | None, remaining_s: float | None
) -> StopPlan:
    """Decide by the time that is left. `is_new`: the current step is not saved. `is_saving`: a save is running."""
    if running_s is None:
        running_s = save_s  # the running save has only just begun
    plan = StopPlan(save=is_new, save_s=save_s, running_s=running_s)
    if not is_new or not is_saving or remaining_s is None or save_s is None:
        return plan
    if (running_s or 0.0) + save_s <= remaining_s:
        return plan
    if save_s <= remaining_s:
        return dataclasses.replace(plan, abort_running=True, running_s=0.0)
    return dataclasses.replace(plan, save=False, no_time=True)
