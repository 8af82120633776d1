"""What a run is told by its user, wherever it was said: an argument, the environment, or nothing.

One function, `resolve`, for the launcher and for what it starts. An argument wins over the environment, which wins over
the default. The names in the environment are those that a cluster sets, too; the launcher passes them on.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from reprieve.errors import ConfigError
from reprieve.units import parse_duration

log = logging.getLogger("reprieve")

AUTO = "auto"
NEVER = "never"
ALL = "all"
OFF = "off"

_TRUE = {"1", "true", "yes", "on"}
_FALSE = {"0", "false", "no", "off"}


@dataclass(frozen=True, slots=True)
class _Kind:
    """One setting: where it comes from, and how its text is understood."""

    env: str
    default: Any
    parse: Callable[[Any], Any]
    help: str
    write: Callable[[Any], str] = str


def _truth(text: str) -> bool:
    if text.strip().lower() in _TRUE:
        return True
    if text.strip().lower() in _FALSE:
        return False
    raise ConfigError(f"{text!r} is neither true nor false")


def _duration(given: str | float | timedelta) -> timedelta:
    """With a unit, or a bare number of seconds, as Kubernetes writes it."""
    bare = isinstance(given, str) and re.fullmatch(r"[0-9]+(\.[0-9]*)?", given.strip())
    return parse_duration(float(given) if bare else given)  # type: ignore[arg-type]


def _duration_or_zero(given: str | float | timedelta) -> timedelta:
    text = given.strip() if isinstance(given, str) else given
    return timedelta(0) if text in (0, timedelta(0), "0", "0s") else _duration(given)


def _count(text: str) -> int:
    if not text.strip().isdecimal():
        raise ConfigError(f"{text!r} is not a number of times: write 0 or more")
    return int(text)


def _steps(text: str) -> int:
    if not text.strip().isdecimal() or not int(text):
        raise ConfigError(f"{text!r}: say after how many steps, 1 or more")
    return int(text)


def _port(text: str) -> int | str:
    text = text.strip().lower()
    if text in (AUTO, OFF):
        return text
    if not text.isdecimal() or int(text) > 65535:
        raise ConfigError(f"{text!r} is no port: write a number up to 65535, 0 for a free one, 'off' or 'auto'")
    return int(text)


def _keep(text: str) -> int | str:
    if text.strip() == ALL:
        return ALL
    if not text.strip().isdecimal() or not int(text):
        raise ConfigError(f"{text!r}: say how many checkpoints to keep, 1 or more, or 'all'")
    return int(text)


def _whole(text: str) -> bool:
    if text.strip().lower() not in ("", "full", "incremental"):
        raise ConfigError(f"{text!r}: it is full or incremental")
    return text.strip().lower() != "incremental"


def _seconds(duration: timedelta) -> str:
    return f"{duration.total_seconds():.3f}".rstrip("0").rstrip(".") + "s"


def _resumes(fresh: bool) -> str:
    return str(not fresh).lower()


KINDS: Mapping[str, _Kind] = {
    "checkpoints": _Kind("CHECKPOINT_URI", None, str, "folder of the checkpoints"),
    "every": _Kind("CHECKPOINT_INTERVAL", "10m", str, "how often to save: 500, epoch, 10m, auto or never"),
    "keep": _Kind("CHECKPOINT_MAX_RETAIN", 3, _keep, "how many checkpoints to keep, or all"),
    "fresh": _Kind("CHECKPOINT_RESUME", False, lambda text: not _truth(text), "start over", _resumes),
    "save_at_end": _Kind("REPRIEVE_SAVE_AT_END", True, _truth, "save the last step when training is done"),
    "grace_period": _Kind("REPRIEVE_GRACE", None, _duration, "time from the signal to the kill", _seconds),
    "kill_wait": _Kind("REPRIEVE_KILL_WAIT", timedelta(0), _duration_or_zero, "go on so long after it", _seconds),
    "name": _Kind("REPRIEVE_RUN", None, str, "the run's name"),
    "max_restarts": _Kind("REPRIEVE_RESTARTS", 0, _count, "how many failures to start again after"),
    "hang_timeout": _Kind("REPRIEVE_HANG", None, _duration, "restart after so long without a step", _seconds),
    "progress_file": _Kind("TRAINING_PROGRESS_FILE", None, str, "file that tells how far the run is"),
    "progress_every": _Kind("PROGRESS_UPDATE_FREQUENCY", 10, _steps, "after how many steps it is written"),
    "metrics_port": _Kind("REPRIEVE_METRICS_PORT", AUTO, _port, "HTTP port that tells it; auto: 28080 in a pod"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Resolved: every value, and who said so."""

    checkpoints: str | None
    """None: where the script says."""
    every: Any
    keep: int | str
    fresh: bool
    save_at_end: bool
    """Of an adapter that saves the last step by itself: should it?"""
    grace_period: timedelta | None
    """None: what is usual on the platform."""
    kill_wait: timedelta
    name: str | None
    max_restarts: int
    hang_timeout: timedelta | None
    """None: never."""
    progress_file: str | None
    progress_every: int
    metrics_port: int | str
    """0: a free one. "off": none. "auto": in a pod, where somebody may ask."""
    sources: Mapping[str, str] = field(default_factory=dict)

    def environment(self) -> dict[str, str]:
        """For what the launcher starts: all that was said."""
        found = {
            kind.env: kind.write(getattr(self, name))
            for name, kind in KINDS.items()
            if self.sources[name] != "default" and getattr(self, name) is not None
        }
        if "CHECKPOINT_INTERVAL" in found:
            # What the interval means is in it, and whether there is one.
            found |= {"CHECKPOINT_STRATEGY": "", "CHECKPOINT_ENABLED": ""}
        return found


def resolve(given: Mapping[str, Any], env: Mapping[str, str] = os.environ, *, options: bool = True) -> Settings:
    """`given`: arguments by name, None for those that were not given; text is parsed as it is in the environment.
    `options`: they are those of a command line, not of a function; for messages."""
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for name, kind in KINDS.items():
        argument = f"--{name.replace('_', '-')}" if options else f"{name}="
        told = given.get(name)
        if told is not None:
            values[name], sources[name] = _parsed(kind.parse, told, argument), argument
        elif env.get(kind.env, "").strip() or (name == "every" and env.get("CHECKPOINT_STRATEGY", "").strip()):
            parse = kind.parse if name != "every" else lambda text: _interval(text, env)
            values[name], sources[name] = _parsed(parse, env.get(kind.env, ""), kind.env), kind.env
        else:
            values[name], sources[name] = kind.default, "default"
    enabled = env.get("CHECKPOINT_ENABLED", "")
    if given.get("every") is None and enabled.strip() and not _parsed(_truth, enabled, "CHECKPOINT_ENABLED"):
        values["every"], sources["every"] = NEVER, "CHECKPOINT_ENABLED"
    whole = _parsed(_whole, env.get("CHECKPOINT_SAVE_TYPE", ""), "CHECKPOINT_SAVE_TYPE")
    if not whole and not options and env.get("RANK", "0") == "0":  # said once: not by the launcher
        log.warning("CHECKPOINT_SAVE_TYPE=incremental: each checkpoint is saved whole, all the same")
    return Settings(**values, sources=sources)


def _parsed(parse: Callable[[Any], Any], value: Any, source: str) -> Any:
    if not isinstance(value, str) and parse not in (_duration, _duration_or_zero):
        return value
    try:
        return parse(value)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None


def _interval(text: str, env: Mapping[str, str]) -> str:
    """A bare number counts what CHECKPOINT_STRATEGY says."""
    strategy, text = env.get("CHECKPOINT_STRATEGY", "").strip().lower(), text.strip()
    if strategy not in ("", "steps", "epoch", "time"):
        raise ConfigError(f"CHECKPOINT_STRATEGY={strategy!r}: it is steps, epoch or time")
    if strategy == "epoch":
        return "epoch"
    if not text:
        return "10m" if strategy == "time" else "500"
    return f"{text}s" if strategy == "time" and text.isdigit() else text
