"""Progress as JSON: the keys that operators, dashboards and scripts rely on (docs/progress.md).

Two forms. The file's has fractions as strings, because it becomes part of a Kubernetes status, which knows no floats.
The HTTP form has plain numbers, and whole ones where those who poll it decode integers. What is not known is null in
both. NaN and infinity, which JSON has no words for, are strings in the first and null in the second.
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
"""Below, an exponent says more than zeros."""
_MOST_SECONDS = 2**31 - 1
"""Kubernetes counts them in 32 bits."""


def dumps(value: Mapping[str, Any], *, indent: int | None = None) -> bytes:
    """Valid JSON in ASCII, or an error."""
    return json.dumps(value, indent=indent, allow_nan=False).encode("ascii")


def for_file(progress: Progress) -> dict[str, Any]:
    """What TRAINING_PROGRESS_FILE holds."""
    return {
        "epoch": None if progress.epoch is None else math.floor(progress.epoch),
        "totalEpochs": whole(progress.total_epochs),
        "step": progress.step,
        "totalSteps": progress.total_steps,
        "loss": text(progress.loss, _LOSS_DIGITS),
        "learningRate": text(progress.learning_rate, _RATE_DIGITS),
        "percentComplete": _percent(progress.percent),
        "estimatedTimeRemaining": _duration(seconds_left(progress)),
        "lastUpdateTime": moment(progress.at),
        "state": progress.state,
        "reason": progress.reason,
        "saved": progress.saved,
        "currentEpoch": text(progress.epoch, 2),
        "estimatedRemainingSeconds": seconds_left(progress),
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


def for_http(progress: Progress) -> dict[str, Any]:
    """What the HTTP server answers with, and what the termination log holds."""
    return {
        "progressPercentage": percentage(progress),
        "estimatedRemainingSeconds": seconds_left(progress),
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
        "lastUpdateTime": moment(progress.at),
        "checkpointing": checkpointing(progress),
    }


def checkpointing(progress: Progress) -> dict[str, Any]:
    known = progress.checkpoints
    return {
        "enabled": known.enabled,
        "latestCheckpoint": known.latest,
        "checkpointsCreated": known.created,
        "latestCheckpointTime": None if known.latest_at is None else moment(known.latest_at),
        "latestCheckpointBytes": known.latest_bytes,
        "checkpointsValid": known.valid,
        "savingStep": known.saving,
        "savingPercentage": None if known.saving_fraction is None else math.floor(100 * known.saving_fraction),
    }


def percentage(progress: Progress) -> int | None:
    """Rounded down: 100 is for what is finished."""
    return None if progress.percent is None else math.floor(progress.percent)


def seconds_left(progress: Progress) -> int | None:
    """Rounded up: 0 is for what is finished."""
    if progress.eta_s is None or not math.isfinite(progress.eta_s):
        return None
    least = 0 if progress.state == RunState.FINISHED else 1
    return min(max(least, math.ceil(progress.eta_s)), _MOST_SECONDS)


def _percent(percent: float | None) -> str | None:
    """`28.3`, rounded down; but 28.3 itself is a little less than that in binary."""
    return None if percent is None else f"{math.floor(10 * percent + 1e-6) / 10:.1f}"


def _duration(seconds: int | None) -> str | None:
    """`20s`, `45m`, `1h30m`: rounded up, and as Go's ParseDuration reads it."""
    if seconds is None or seconds < 60:
        return None if seconds is None else f"{seconds}s"
    hours, minutes = divmod(math.ceil(seconds / 60), 60)
    return (f"{hours}h" if hours else "") + (f"{minutes}m" if minutes else "")


def _checkpoint(step: int | None) -> str | None:
    return None if step is None else f"checkpoint-{step}"


def moment(at: float) -> str:
    """`2024-01-15T10:30:00Z`."""
    return datetime.fromtimestamp(at, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def number(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def whole(value: float | None) -> int | None:
    return None if value is None or not math.isfinite(value) else math.ceil(value)


def spelt(value: float) -> str:
    """All its digits."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    return repr(value)


def text(value: float | None, digits: int) -> str | None:
    """`0.000050`: as many digits, or more where fewer than two of them would say something."""
    if value is None:
        return None
    if not math.isfinite(value):
        return spelt(value)
    if value and abs(value) < _SMALLEST:
        return f"{value:.2g}"
    return f"{value:.{max(digits, 1 - math.floor(math.log10(abs(value)))) if value else digits}f}"
