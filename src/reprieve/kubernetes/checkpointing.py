"""`spec.checkpointing` of a TrainJob: how it wants to be checkpointed.

The same fields come from two places: the field of the spec, where the resource definition has it (crd.py), and the
annotation `reprieve.dev/checkpointing`, where it may not be changed. Both are parsed here, with the same checks as the
schema's, and `to_yaml` writes the normalised form, from which everything later reads. A normalised text parses to equal
settings.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from reprieve.checkpoint.schedule import Schedule
from reprieve.errors import ConfigError
from reprieve.kubernetes import plain_yaml
from reprieve.kubernetes.fields import Fields
from reprieve.kubernetes.storage import ClaimMount, parse_storage
from reprieve.settings import SETTINGS, resolve

VERSION = 1
INTERVAL = "5m"
MAX_CHECKPOINTS = 3
STRATEGIES = ("steps", "epoch", "time")
SAVE_TYPES = ("full", "incremental")
ACCESS_MODES = ("ReadWriteOnce", "ReadWriteMany", "ReadWriteOncePod")

_VARIABLE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
_FIELDS = (
    *("version", "enabled", "interval", "maxCheckpoints", "resumeFromCheckpoint", "storage", "persistentVolume"),
    *("strategy", "saveType", "gracePeriod", "killWait", "env"),
)

Object = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpointing:
    """The settings of one TrainJob, normalised."""

    enabled: bool = True
    interval: str = INTERVAL
    max_checkpoints: int = MAX_CHECKPOINTS
    resume: bool = True
    uri: str = ""
    """A folder in the pod, or the URI of an object store."""
    access_mode: str = ""
    secret: str = ""
    """The Secret with the credentials of an object store."""
    volume: ClaimMount | None = None
    """Holds the folder; with an object store, the folder to fall back to."""
    strategy: str = ""
    save_type: str = ""
    grace_period: timedelta | None = None
    kill_wait: timedelta | None = None
    env: tuple[Object, ...] = ()
    """EnvVars of Kubernetes."""

    @property
    def in_object_store(self) -> bool:
        return "://" in self.uri

    @property
    def folder(self) -> str:
        """The folder of the pod that checkpoints go to."""
        if not self.in_object_store or self.volume is None:
            return self.uri
        # Two jobs with different prefixes in a bucket share no folder of the claim, either.
        return posixpath.join(self.volume.path, self.uri.partition("://")[2].partition("/")[2].strip("/"))

    def to_yaml(self) -> str:
        """Return the normalised text of the annotation."""
        found: Object = {"version": VERSION, "enabled": self.enabled}
        found |= {"interval": self.interval, "maxCheckpoints": self.max_checkpoints}
        found["resumeFromCheckpoint"] = self.resume
        storage: Object = {"uri": self.uri, "accessMode": self.access_mode}
        storage["secretRef"] = {"name": self.secret} if self.secret else None
        volume = self.volume.to_json() if self.volume else None
        storage["persistentVolume"] = None if self.in_object_store else volume
        found["storage"] = {name: value for name, value in storage.items() if value}
        found["persistentVolume"] = volume if self.in_object_store else None
        found |= {"strategy": self.strategy, "saveType": self.save_type}
        found["gracePeriod"] = _format_duration(self.grace_period)
        found["killWait"] = _format_duration(self.kill_wait)
        found["env"] = [dict(variable) for variable in self.env]
        kept = {name: value for name, value in found.items() if value not in (None, "", [], {})}
        return plain_yaml.dump(kept)


def from_yaml(text: str, where: str) -> Checkpointing:
    """Parse the annotation. `where`: its name, for messages."""
    return parse(plain_yaml.load(text, where), where)


def parse(found: object, where: str) -> Checkpointing:
    """Parse the field or the content of the annotation. ConfigError names the field and what to write."""
    fields = Fields(found, where)
    fields.check_names(_FIELDS)
    version = fields.integer("version", VERSION)
    if version > VERSION:
        raise ConfigError(f"{where}.version: {version} is newer than this version of Reprieve reads ({VERSION})")
    storage = fields.child("storage")
    storage.check_names(("uri", "accessMode", "secretRef", "persistentVolume"))
    enabled = fields.boolean("enabled", True)
    uri, volume = parse_storage(storage, fields.child("persistentVolume"))
    if enabled and not uri:
        raise ConfigError(
            f"{where}.storage: there is none: write storage.uri, or storage.persistentVolume.claimName, or "
            f"enabled: false"
        )
    settings = Checkpointing(
        enabled=enabled,
        interval=fields.text("interval", INTERVAL),
        max_checkpoints=fields.integer("maxCheckpoints", MAX_CHECKPOINTS),
        resume=fields.boolean("resumeFromCheckpoint", True),
        uri=uri,
        access_mode=storage.choice("accessMode", ACCESS_MODES),
        secret=storage.child("secretRef").object_name("name"),
        volume=volume,
        strategy=fields.choice("strategy", STRATEGIES),
        save_type=fields.choice("saveType", SAVE_TYPES),
        grace_period=fields.duration("gracePeriod"),
        kill_wait=fields.duration("killWait", zero=True),
        env=_env(fields),
    )
    if settings.max_checkpoints < 1:
        raise ConfigError(f"{where}.maxCheckpoints: keep at least 1; enabled: false turns checkpoints off")
    if settings.grace_period and settings.kill_wait and settings.kill_wait >= settings.grace_period:
        raise ConfigError(f"{where}.killWait: it leaves nothing of the grace period to save in: write less than that")
    _check_interval(settings, where)
    return settings


def check_environment(values: Mapping[str, str], where: str) -> None:
    """Raise ConfigError for variables that a training would refuse at its start. Nothing is logged."""
    # With a fallback, a training logs that it does not write to the object store.
    checked = {name: value for name, value in values.items() if name != SETTINGS["fallback"].env}
    try:
        Schedule.of(resolve({}, checked).every)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def _check_interval(settings: Checkpointing, where: str) -> None:
    interval = settings.interval.strip() or "0"
    try:
        values = {"CHECKPOINT_INTERVAL": interval, "CHECKPOINT_STRATEGY": settings.strategy}
        Schedule.of(resolve({}, values).every)
    except ConfigError:
        if settings.strategy == "steps":
            fix = 'strategy: steps counts steps: write interval: "500", or strategy: time'
        else:
            fix = "write 5m, 90s or 1h30m; epoch, auto or never; a number of steps with strategy: steps"
        raise ConfigError(f"{where}.interval: {settings.interval!r} is not understood: {fix}") from None


def _env(fields: Fields) -> tuple[Object, ...]:
    found = fields.values.get("env") or []
    where = f"{fields.where}.env"
    if not isinstance(found, Sequence) or isinstance(found, str):
        raise ConfigError(f"{where}: write a list of variables, each with name and value")
    variables: list[Object] = []
    for number, each in enumerate(found):
        variable = Fields(each, f"{where}[{number}]")
        variable.check_names(("name", "value", "valueFrom"))
        name = variable.text("name", "")
        if not _VARIABLE_NAME.fullmatch(name):
            raise ConfigError(
                f"{variable.where}.name: it is not the name of a variable: write NAME, and value beside it"
            )
        if any(name == other["name"] for other in variables):
            raise ConfigError(f"{variable.where}.name: {name} is there twice: keep one of the two")
        value, source = variable.text("value", ""), variable.child("valueFrom").values
        if value and source:
            raise ConfigError(f"{variable.where}: {name} has a value and valueFrom: keep one of the two")
        variables.append(
            {"name": name, **({"value": value} if value else {}), **({"valueFrom": source} if source else {})}
        )
    return tuple(variables)


def _format_duration(duration: timedelta | None) -> str | None:
    if duration is None:
        return None
    seconds = duration.total_seconds()
    return f"{int(seconds)}s" if seconds == int(seconds) else f"{int(seconds * 1000)}ms"
