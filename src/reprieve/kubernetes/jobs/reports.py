"""What rank 0 reports: its answer to `/trainingProgress`, and the termination message that its pod leaves behind.

Both are text that anybody in the pod may have written. Whatever it is, a report comes back, with what was left out of
it; text that is no report at all is a `NoReport`.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

from reprieve.kubernetes.jobs.training_progress import TrainingProgress, Unusable, int64, parse
from reprieve.progress import metrics
from reprieve.progress.formats import progress_json
from reprieve.progress.snapshot import STATES

Object = dict[str, Any]

MAX_CLOCK_SKEW = timedelta(seconds=5)
"""How far a pod's clock may be ahead of the operator's before its times are not believed."""
_MAX_PERCENT = 100.0


class NoReport(Exception):
    """The text is no report. The message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What rank 0 has reported at one time. `progress.state` is one of `RunState`."""

    pod: str
    progress: TrainingProgress
    message: str | None = None
    """The launcher's last line, in a termination message."""
    problems: tuple[str, ...] = ()
    """What was left out because it cannot be right."""


def from_answer(body: bytes, pod: str, now: datetime) -> Report:
    """Read the answer to `/trainingProgress`."""
    return _report(_loads(body), pod, now)


def from_termination_message(text: str, pod: str, now: datetime) -> Report:
    """Read a termination message: metrics by the names that training gave them, and the launcher's last line."""
    content = _loads(text.encode(errors="replace"))
    message = content.get("message")
    report = _report(_as_status(content), pod, now)
    return replace(report, message=message if isinstance(message, str) else None)


def _loads(body: bytes) -> Object:
    try:
        content = json.loads(body, parse_constant=lambda name: name)
    except (ValueError, RecursionError) as error:
        raise NoReport(f"not JSON ({error})") from None
    if not isinstance(content, dict) or content.get("state") not in list(STATES):
        raise NoReport("JSON, but not Reprieve's progress")
    return content


def _report(content: Object, pod: str, now: datetime) -> Report:
    progress, problems = parse(content)
    progress = replace(progress, stale=None, last_exit=None, conditions=None, starts_without_progress=None)
    progress, wrong = _without_impossible(progress, now)
    return Report(pod=pod, progress=progress, problems=(*problems, *wrong))


def _without_impossible(progress: TrainingProgress, now: datetime) -> tuple[TrainingProgress, list[str]]:
    """Leave out what has the right type and cannot be true."""
    wrong: list[str] = []
    latest = now + MAX_CLOCK_SKEW
    if progress.last_update_time is not None and progress.last_update_time > latest:
        wrong.append("lastUpdateTime: in the future")
        progress = replace(progress, last_update_time=None)
    if (saved_at := progress.checkpointing.latest_checkpoint_time) is not None and saved_at > latest:
        wrong.append("checkpointing.latestCheckpointTime: in the future")
        progress = replace(progress, checkpointing=replace(progress.checkpointing, latest_checkpoint_time=None))
    percent = progress.percent
    if progress.percent_complete is not None and (percent is None or not 0 <= percent <= _MAX_PERCENT):
        wrong.append("percentComplete: not between 0 and 100")
        progress = replace(progress, percent_complete=None)
    return progress, wrong


def _as_status(content: Object) -> Object:
    """Turn the form of the termination message into that of the status."""
    found = {name: value for name, value in content.items() if name != "message"}
    trained, evaluated = _numbers(content.get("trainMetrics")), _numbers(content.get("evalMetrics"))
    values = {**metrics.named(metrics.TRAIN, trained), **metrics.named(metrics.EVALUATION, evaluated)}
    for name, field, digits in (
        ("loss", "loss", 4),
        ("accuracy", "accuracy", 4),
        ("learning_rate", "learningRate", 6),
        ("gradient_norm", "gradientNorm", 4),
        ("validation_loss", "validationLoss", 4),
        ("validation_accuracy", "validationAccuracy", 4),
    ):
        found[field] = progress_json.text(values.get(name), digits)
    for field in ("samplesPerSecond", "tokensPerSecond", "currentEpoch"):
        found[field] = progress_json.text(_number(content.get(field)), 2)
    found["step"] = content.get("step", content.get("currentStep"))
    epoch, percent = _number(content.get("currentEpoch")), _number(content.get("progressPercentage"))
    found["epoch"] = None if epoch is None else math.floor(epoch)
    found["percentComplete"] = None if percent is None else f"{percent:.1f}"
    with contextlib.suppress(Unusable):
        seconds = int64(content.get("estimatedRemainingSeconds"))
        found["estimatedTimeRemaining"] = progress_json.go_duration(seconds)
    return found


def _numbers(content: object) -> dict[str, float]:
    if not isinstance(content, Mapping):
        return {}
    return {str(name): found for name, value in content.items() if (found := _number(value)) is not None}


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        found = float(value)
    except OverflowError:
        return None
    return found if math.isfinite(found) else None
