"""How much of a run is done, and how long the rest takes."""

from __future__ import annotations

_NOT_YET_PERCENT = 99.9
_NOT_YET_S = 1.0
"""The most and the least that is said of a run that is not finished: the last save may still be under way, or it was
stopped. Others take 100 % or 0 s for the end (the status of a TrainJob is no longer read then)."""


def left(
    *,
    step: int,
    total_steps: int | None,
    epoch: float | None,
    total_epochs: float | None,
    seconds_per_step: float | None,
    finished: bool,
) -> tuple[float | None, float | None]:
    """In percent, and in seconds; None where nobody knows."""
    if finished:
        return 100.0, 0.0
    if total_steps:
        done, steps_left = step / total_steps, float(total_steps - step)
    elif total_epochs and epoch:
        done, steps_left = epoch / total_epochs, (total_epochs - epoch) * step / epoch
    elif total_epochs and epoch == 0:
        return 0.0, None
    else:
        return None, None
    percent = min(100 * max(0.0, done), _NOT_YET_PERCENT)
    return percent, None if seconds_per_step is None else max(steps_left * seconds_per_step, _NOT_YET_S)
