"""`status.trainingProgress` as a value: what the operator writes, and what it reads back after a restart.

A report of rank 0 has the same fields, so both are read here. Nothing in them is trusted: a value of a wrong type, a
number that the API server would refuse, or a text without end is left out and named. Unknown values are None, and are
not written.
"""

# ruff: noqa: RUF009 - _field makes fields
from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

Object = dict[str, Any]

MAX_TEXT_LENGTH = 1024
MAX_LISTED = 20
MAX_CONDITIONS = 16

_INT32, _INT64 = 2**31, 2**63
_NUMBER = re.compile(r"-?([0-9]{1,40}([.][0-9]{1,40})?([eE][-+]?[0-9]{1,3})?|Infinity)|NaN")
_FIRST_TIME = datetime(1970, 1, 1, tzinfo=timezone.utc)
"""Earlier ones mean none, as Go's 0001-01-01. strftime writes that year as 1, which the API server refuses."""


class Unusable(Exception):
    """A value that cannot be in a status. The message says why."""


def text(value: object) -> str:
    if not isinstance(value, str):
        raise Unusable("not a text")
    cleaned = "".join(character if character.isprintable() else " " for character in value)
    return cleaned if len(cleaned) <= MAX_TEXT_LENGTH else f"{cleaned[: MAX_TEXT_LENGTH - 1]}…"


def number_text(value: object) -> str:
    """A fraction: Kubernetes has no floats, so it is written as text."""
    if not isinstance(value, str) or not _NUMBER.fullmatch(value):
        raise Unusable("not a number in a text")
    return value


def boolean(value: object) -> bool:
    if not isinstance(value, bool):
        raise Unusable("neither true nor false")
    return value


def int32(value: object) -> int:
    return _count(value, _INT32)


def int64(value: object) -> int:
    return _count(value, _INT64)


def time(value: object) -> datetime:
    if not isinstance(value, str):
        raise Unusable("not a time")
    try:
        found = datetime.fromisoformat(value.replace("Z", "+00:00"))
        if found.tzinfo is None or found < _FIRST_TIME:
            raise ValueError
        return found.astimezone(timezone.utc).replace(microsecond=0)
    except (ValueError, OverflowError):
        raise Unusable("not a time with its zone") from None


def _count(value: object, limit: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < limit:
        raise Unusable(f"not a count below {limit}")
    return value


def _each(kind: Callable[[object], Any], most: int) -> Callable[[object], tuple[Any, ...]]:
    def read(value: object) -> tuple[Any, ...]:
        if not isinstance(value, list):
            raise Unusable("not a list")
        return tuple(kind(each) for each in value[:most])

    return read


def _field(kind: Callable[[object], Any], default: Any = None) -> Any:
    return dataclasses.field(default=default, metadata={"kind": kind})


@dataclass(frozen=True, slots=True, kw_only=True)
class AvailableCheckpoint:
    """A checkpoint in the folder of the job."""

    path: str | None = _field(text)
    step: int | None = _field(int64)
    epoch: int | None = _field(int64)
    created: datetime | None = _field(time)
    created_at: datetime | None = _field(time)
    bytes: int | None = _field(int64)
    size: int | None = _field(int64)
    valid: bool | None = _field(boolean)
    reason: str | None = _field(text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoints:
    """What is saved."""

    enabled: bool | None = _field(boolean)
    latest_checkpoint: str | None = _field(text)
    latest_checkpoint_time: datetime | None = _field(time)
    latest_checkpoint_bytes: int | None = _field(int64)
    latest_checkpoint_size: int | None = _field(int64)
    checkpoints_created: int | None = _field(int64)
    checkpoints_valid: int | None = _field(int32)
    saving_step: int | None = _field(int64)
    saving_percentage: int | None = _field(int32)
    last_save_duration: str | None = _field(text)
    error: str | None = _field(text)
    available_checkpoints: tuple[AvailableCheckpoint, ...] | None = _field(
        _each(lambda value: _read(AvailableCheckpoint, value, strict=True), MAX_LISTED)
    )

    @property
    def last_save_seconds(self) -> float | None:
        try:
            return None if self.last_save_duration is None else finite(self.last_save_duration.removesuffix("s"))
        except ValueError:
            return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """Something that happened to a job, as Kubernetes writes it."""

    type: str = _field(text, "")
    status: str = _field(text, "")
    reason: str = _field(text, "")
    message: str = _field(text, "")
    last_transition_time: datetime | None = _field(time)

    @property
    def holds(self) -> bool:
        return self.status == "True"


@dataclass(frozen=True, slots=True, kw_only=True)
class LastExit:
    """How the last start of the job that has ended did so."""

    pod: str | None = _field(text)
    """Rank 0's."""
    time: datetime | None = _field(time)
    exit_code: int | None = _field(int32)
    reason: str | None = _field(text)
    message: str | None = _field(text)
    checkpoint_step: int | None = _field(int64)
    """The newest durable checkpoint at that time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingProgress:
    """The whole block. The schema in train_job_schema.yaml describes each field."""

    state: str | None = _field(text)
    reason: str | None = _field(text)
    stale: bool | None = _field(boolean)
    run: str | None = _field(text)
    pod: str | None = _field(text)
    step: int | None = _field(int64)
    total_steps: int | None = _field(int64)
    epoch: int | None = _field(int64)
    total_epochs: int | None = _field(int64)
    current_epoch: str | None = _field(number_text)
    percent_complete: str | None = _field(number_text)
    estimated_time_remaining: str | None = _field(text)
    estimated_remaining_seconds: int | None = _field(int64)
    loss: str | None = _field(number_text)
    accuracy: str | None = _field(number_text)
    validation_loss: str | None = _field(number_text)
    validation_accuracy: str | None = _field(number_text)
    learning_rate: str | None = _field(number_text)
    gradient_norm: str | None = _field(number_text)
    samples_per_second: str | None = _field(number_text)
    tokens_per_second: str | None = _field(number_text)
    resumed_from: str | None = _field(text)
    resumed_from_step: int | None = _field(int64)
    restarts: int | None = _field(int32)
    starts_without_progress: int | None = _field(int32)
    saved: bool | None = _field(boolean)
    last_update_time: datetime | None = _field(time)
    last_exit: LastExit | None = _field(lambda value: _read(LastExit, value, strict=True))
    checkpointing: Checkpoints = _field(lambda value: _read(Checkpoints, value, strict=False), Checkpoints())
    conditions: tuple[Condition, ...] | None = _field(
        _each(lambda value: _read(Condition, value, strict=True), MAX_CONDITIONS)
    )

    def to_json(self) -> Object:
        """Return the block as it is written: unknown values are left out."""
        found: Object = _to_json(self)
        return found

    @property
    def latest_step(self) -> int | None:
        """The step of the newest durable checkpoint."""
        return step_of(self.checkpointing.latest_checkpoint)

    @property
    def percent(self) -> float | None:
        return None if self.percent_complete is None else finite(self.percent_complete)

    def condition(self, kind: str) -> Condition | None:
        return next((each for each in self.conditions or () if each.type == kind), None)


def parse(content: object) -> tuple[TrainingProgress, list[str]]:
    """Read a block, and return it with what is wrong in it: `loss: not a number in a text`."""
    problems: list[str] = []
    return _read(TrainingProgress, content, strict=False, problems=problems), problems


def json_names(kind: Any) -> list[str]:
    """Return the names of the fields of a dataclass of this module, as they are written."""
    return [name for _, name in _names(kind)]


def step_of(checkpoint: str | None) -> int | None:
    """Return the step in the name of a checkpoint."""
    found = re.search(r"(?:^|/)checkpoint-(\d{1,18})/?$", checkpoint or "")
    return int(found[1]) if found else None


def finite(value: str) -> float | None:
    found = float(value)
    return found if math.isfinite(found) else None


def _read(kind: Any, content: object, *, strict: bool, problems: list[str] | None = None) -> Any:
    """Read a dataclass. What is wrong is left out and added to `problems`; `strict`: it raises Unusable."""
    if not isinstance(content, Mapping):
        if strict or problems is None:
            raise Unusable("has no fields")
        problems.append("has no fields")
        return kind()
    values: Object = {}
    for field, name in _names(kind):
        value = content.get(name)
        if value is None:
            continue
        try:
            if field.name == "checkpointing" and problems is not None:
                nested: list[str] = []
                values[field.name] = _read(Checkpoints, value, strict=False, problems=nested)
                problems.extend(f"checkpointing.{each}" for each in nested)
            else:
                values[field.name] = field.metadata["kind"](value)
        except Unusable as error:
            if strict:
                raise Unusable(f"{name}: {error}") from None
            if problems is not None:
                problems.append(f"{name}: {error}")
    return kind(**values)


_known_names: dict[Any, list[tuple[dataclasses.Field[Any], str]]] = {}


def _names(kind: Any) -> list[tuple[dataclasses.Field[Any], str]]:
    """The fields of a dataclass, with their names in JSON."""
    if kind not in _known_names:
        _known_names[kind] = [
            (field, re.sub(r"_(\w)", lambda match: match[1].upper(), field.name)) for field in dataclasses.fields(kind)
        ]
    return _known_names[kind]


def _to_json(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.strftime("%Y-%m-%dT%H:%M:%SZ")
    if isinstance(value, tuple):
        return [_to_json(each) for each in value]
    if not dataclasses.is_dataclass(value):
        return value
    found = {name: _to_json(getattr(value, field.name)) for field, name in _names(type(value))}
    return {name: each for name, each in found.items() if each is not None and each != {}}
