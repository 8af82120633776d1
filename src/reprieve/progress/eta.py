"""Computes how much of a run is done, and how long the rest takes."""

from __future__ import annotations

_MAX_UNFINISHED_PERCENT = 99.9
_MIN_UNFINISHED_S = 1.0
"""Limits for a run that is not finished: its last save may still be in progress, or it was stopped. Readers take 100 %
or 0 s for the end; Kubeflow stops reading the status of a TrainJob then."""


def completed_fraction(
    *, step: int, total_steps: int | None, epoch: float | None, total_epochs: float | None
) -> float | None:
    """Return the completed fraction of the training, from 0 to 1; None: unknown."""
    if total_steps:
        return min(1.0, max(0.0, step / total_steps))
    return min(1.0, max(0.0, epoch / total_epochs)) if total_epochs and epoch is not None else None


def remaining(
    *,
    step: int,
    total_steps: int | None,
    epoch: float | None,
    total_epochs: float | None,
    seconds_per_step: float | None,
    finished: bool,
) -> tuple[float | None, float | None]:
    """Return the completed percentage and the remaining seconds; None where they are unknown."""
    if finished:
        return 100.0, 0.0
    fraction = completed_fraction(step=step, total_steps=total_steps, epoch=epoch, total_epochs=total_epochs)
    if fraction is None:
        return None, None
    percent = min(100 * fraction, _MAX_UNFINISHED_PERCENT)
    if total_steps:
        remaining_steps = float(total_steps - step)
    elif total_epochs and epoch:
        remaining_steps = (total_epochs - epoch) * step / epoch
    else:
        return percent, None
    return percent, None if seconds_per_step is None else max(remaining_steps * seconds_per_step, _MIN_UNFINISHED_S)
