"""Progress as JSON: the keys that operators, dashboards and scripts rely on (docs/progress.md).

There are two forms. The file has fractions as strings, because it becomes part of a Kubernetes status, which has no
floats; `/trainingProgress` serves it with more facts. The HTTP form has numbers, and integers where its readers decode
integers. Unknown values are null in both. NaN and infinity, which JSON cannot express, are strings in the file and null
over HTTP.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any

from reprieve.progress.snapshot import Progress
from reprieve.run_state import RunState

_LOSS_DIGITS = 4
_RATE_DIGITS = 6
_SMALLEST = 1e-15
"""Smaller values are written with an exponent."""
_MAX_SECONDS = 2**31 - 1
"""Kubernetes counts seconds in 32 bits."""


def dumps(value: Mapping[str, Any], *, indent: int | None = None) -> bytes:
    """Return strict JSON in ASCII. Raises ValueError for NaN and infinity."""
    return json.dumps(value, indent=indent, allow_nan=False).encode("ascii")


def for_file(progress: Progress) -> dict[str, Any]:
    """Return the content of TRAINING_PROGRESS_FILE."""
    return {
        "epoch": _completed(progress.epoch),
        "totalEpochs": whole(progress.total_epochs),
        "step": progress.step,
        "totalSteps": progress.total_steps,
        "loss": text(progress.loss, _LOSS_DIGITS),
        "learningRate": text(progress.learning_rate, _RATE_DIGITS),
        "percentComplete": _percent(progress.percent),
        "estimatedTimeRemaining": go_duration(remaining_seconds(progress)),
        "lastUpdateTime": timestamp(progress.at),
        "state": progress.state,
        "reason": progress.reason,
        "saved": progress.saved,
        "currentEpoch": text(progress.epoch, 2),
        "estimatedRemainingSeconds": remaining_seconds(progress),
        "accuracy": text(progress.accuracy, _LOSS_DIGITS),
        "validationLoss": text(progress.validation_loss, _LOSS_DIGITS),
        "validationAccuracy": text(progress.validation_accuracy, _LOSS_DIGITS),
        "gradientNorm": text(progress.gradient_norm, _LOSS_DIGITS),
        "samplesPerSecond": text(progress.samples_per_s, 2),
        "tokensPerSecond": text(progress.tokens_per_s, 2),
        "resumedFrom": _checkpoint(progress.resumed_from),
        "resumedFromStep": progress.resumed_from,
        "restarts": progress.restarts,
        "checkpointing": checkpointing(progress),
    }


def for_training_progress(progress: Progress) -> dict[str, Any]:
    """Return the content of `/trainingProgress`: that of the file, the run's name, and what is in its folder.

    `createdAt`, `size` and `latestCheckpointSize` are what readers of the checkpointing proposal for Trainer expect.
    """
    checkpoints = progress.checkpoints
    return {
        **for_file(progress),
        "run": progress.run,
        "checkpointing": {
            **checkpointing(progress),
            "latestCheckpointSize": checkpoints.latest_bytes,
            "lastSaveDuration": save_duration(progress),
            "availableCheckpoints": [
                {
                    "path": each.path,
                    "step": each.step,
                    "epoch": _completed(each.epoch),
                    "created": timestamp(each.created_at),
                    "createdAt": timestamp(each.created_at),
                    "bytes": each.bytes,
                    "size": each.bytes,
                    "valid": each.problem is None,
                    "reason": each.problem,
                }
                for each in checkpoints.listed
            ],
        },
    }


def for_http(progress: Progress) -> dict[str, Any]:
    """Return the content of the HTTP response and of the termination log."""
    return {
        "progressPercentage": percentage(progress),
        "estimatedRemainingSeconds": remaining_seconds(progress),
        "currentStep": progress.step,
        "totalSteps": progress.total_steps,
        "currentEpoch": number(progress.epoch),
        "totalEpochs": whole(progress.total_epochs),
        "trainMetrics": {name: number(value) for name, value in progress.train.items()},
        "evalMetrics": {name: number(value) for name, value in progress.evaluation.items()},
        "state": progress.state,
        "reason": progress.reason,
        "saved": progress.saved,
        "samplesPerSecond": number(progress.samples_per_s),
        "tokensPerSecond": number(progress.tokens_per_s),
        "resumedFrom": _checkpoint(progress.resumed_from),
        "resumedFromStep": progress.resumed_from,
        "restarts": progress.restarts,
        "lastUpdateTime": timestamp(progress.at),
        "checkpointing": checkpointing(progress),
    }


def checkpointing(progress: Progress) -> dict[str, Any]:
    checkpoints = progress.checkpoints
    return {
        "enabled": checkpoints.enabled,
        "latestCheckpoint": checkpoints.latest,
        "checkpointsCreated": checkpoints.created,
        "latestCheckpointTime": None if checkpoints.latest_at is None else timestamp(checkpoints.latest_at),
        "latestCheckpointBytes": checkpoints.latest_bytes,
        "checkpointsValid": checkpoints.valid,
        "savingStep": checkpoints.saving,
        "savingPercentage": None
        if checkpoints.saving_fraction is None
        else math.floor(100 * checkpoints.saving_fraction),
    }


def save_duration(progress: Progress) -> str | None:
    """Return how long the last save took: `12.41s`."""
    seconds = progress.checkpoints.last_save_s
    return None if seconds is None else f"{seconds:.2f}s"


def percentage(progress: Progress) -> int | None:
    """Return the percentage, rounded down: only a finished run has 100."""
    return None if progress.percent is None else math.floor(progress.percent)


def remaining_seconds(progress: Progress) -> int | None:
    """Return the remaining seconds, rounded up: only a finished run has 0."""
    if progress.eta_s is None or not math.isfinite(progress.eta_s):
        return None
    least = 0 if progress.state == RunState.FINISHED else 1
    return min(max(least, math.ceil(progress.eta_s)), _MAX_SECONDS)


def _percent(percent: float | None) -> str | None:
    """Round down to one digit: `28.3`. The small addend compensates for 28.3 not being exact in binary."""
    return None if percent is None else f"{math.floor(10 * percent + 1e-6) / 10:.1f}"


def go_duration(seconds: int | None) -> str | None:
    """Format for Go's ParseDuration, rounded up: `20s`, `45m`, `1h30m`."""
    if seconds is None or seconds < 60:
        return None if seconds is None else f"{seconds}s"
    hours, minutes = divmod(math.ceil(seconds / 60), 60)
    return (f"{hours}h" if hours else "") + (f"{minutes}m" if minutes else "")


def _checkpoint(step: int | None) -> str | None:
    return None if step is None else f"checkpoint-{step}"


def timestamp(at: float) -> str:
    """Format as `2024-01-15T10:30:00Z`."""
    return datetime.fromtimestamp(at, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def number(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _completed(epoch: float | None) -> int | None:
    return None if epoch is None else math.floor(epoch)


def whole(value: float | None) -> int | None:
    return None if value is None or not math.isfinite(value) else math.ceil(value)


def exact_text(value: float) -> str:
    """Format a number with all its digits."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    return repr(value)


def text(value: float | None, digits: int) -> str | None:
    """Format with `digits` decimals, or more to show at least two significant digits: `0.000050`."""
    if value is None:
        return None
    if not math.isfinite(value):
        return exact_text(value)
    if value and abs(value) < _SMALLEST:
        return f"{value:.2g}"
    return f"{value:.{max(digits, 1 - math.floor(math.log10(abs(value)))) if value else digits}f}"
