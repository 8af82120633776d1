"""The settings of a run, from arguments, environment variables and defaults, in this order of precedence.

Each setting is declared once, as a field of `Settings`. The declaration feeds the environment variable, the option of
`reprieve run` with its help, `--explain`, and the table in docs/launch.md (a test compares them). The launcher and the
processes that it starts call the same `resolve`: the launcher passes its settings on as environment variables, whose
names clusters use as well.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from datetime import timedelta
from typing import Any

from reprieve.errors import ConfigError
from reprieve.host import in_pod
from reprieve.launcher_protocol import DRILL, START_OVER
from reprieve.units import parse_duration

log = logging.getLogger("reprieve")

AUTO = "auto"
NEVER = "never"
ALL = "all"
OFF = "off"

_TRUE = {"1", "true", "yes", "on"}
_FALSE = {"0", "false", "no", "off"}


# How texts are parsed


def parse_bool(text: str) -> bool:
    if text.strip().lower() in _TRUE:
        return True
    if text.strip().lower() in _FALSE:
        return False
    raise ConfigError(f"{text!r} is neither true nor false")


def _parse_resume(text: str) -> bool:
    """Return `fresh`, the opposite of CHECKPOINT_RESUME."""
    return not parse_bool(text)


def _parse_duration(value: str | float | timedelta) -> timedelta:
    """A duration with a unit, or a bare number of seconds, as Kubernetes writes it."""
    is_number = isinstance(value, str) and re.fullmatch(r"[0-9]+(\.[0-9]*)?", value.strip())
    return parse_duration(float(value) if is_number else value)  # type: ignore[arg-type]


def _parse_duration_or_zero(value: str | float | timedelta) -> timedelta:
    text = value.strip() if isinstance(value, str) else value
    return timedelta(0) if text in (0, timedelta(0), "0", "0s") else _parse_duration(value)


def _parse_count(text: str) -> int:
    if not text.strip().isdecimal():
        raise ConfigError(f"{text!r} is not a number of times: write 0 or more")
    return int(text)


def _parse_steps(text: str) -> int:
    if not text.strip().isdecimal() or not int(text):
        raise ConfigError(f"{text!r} is not a number of steps: write 1 or more")
    return int(text)


def _parse_port(text: str) -> int | str:
    text = text.strip().lower()
    if text in (AUTO, OFF):
        return text
    if not text.isdecimal() or int(text) > 65535:
        raise ConfigError(f"{text!r} is not a port: write a number up to 65535, 0 for a free port, 'off' or 'auto'")
    return int(text)


def _parse_keep(text: str) -> int | str:
    if text.strip() == ALL:
        return ALL
    if not text.strip().isdecimal() or not int(text):
        raise ConfigError(f"{text!r} is not a number of checkpoints: write 1 or more, or 'all'")
    return int(text)


def _check_save_type(text: str) -> str:
    if text.strip().lower() not in ("", "full", "incremental"):
        raise ConfigError(f"{text!r}: write full or incremental")
    return text.strip().lower()


def _format_seconds(duration: timedelta) -> str:
    return f"{duration.total_seconds():.3f}".rstrip("0").rstrip(".") + "s"


def _format_resume(fresh: bool) -> str:
    return str(not fresh).lower()


# What a setting is


@dataclass(frozen=True, slots=True)
class Setting:
    """The declaration of one setting: its environment variable, option, default and text format."""

    env: str
    help: str
    default: Any = None
    parse: Callable[[Any], Any] = str
    format: Callable[[Any], str] = str
    metavar: str | None = None
    """The name of the option's value in the help; None: the option is a flag, or there is none."""
    is_option: bool = True
    """Whether `reprieve run` has an option for it."""
    default_text: str = "-"
    """The default, as docs and `--help` describe it."""


def _declare(*args: Any, **options: Any) -> dict[str, Setting]:
    """Return the metadata of a field that declares a setting."""
    return {"setting": Setting(*args, **options)}


def option_of(name: str) -> str:
    return f"--{name.replace('_', '-')}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The resolved settings of a run, and where each value comes from."""

    checkpoints: str | None = field(
        metadata=_declare(
            "CHECKPOINT_URI",
            "folder of the checkpoints, where the script does not name one",
            metavar="PATH",
            default_text="the script's",
        )
    )
    fallback: str | None = field(
        metadata=_declare(
            "CHECKPOINT_FALLBACK_URI",
            "folder that takes the place of an object store, which this version does not write to",
            is_option=False,
            default_text="none",
        )
    )
    every: Any = field(
        metadata=_declare(
            "CHECKPOINT_INTERVAL",
            "how often to save: 500 (steps), epoch, 10m, never, or auto (from save cost and failure rate)",
            "10m",
            metavar="INTERVAL",
            default_text="10m",
        )
    )
    keep: int | str = field(
        metadata=_declare(
            "CHECKPOINT_MAX_RETAIN",
            "how many checkpoints to keep, or all",
            3,
            parse=_parse_keep,
            metavar="N",
            default_text="3",
        )
    )
    fresh: bool = field(
        metadata=_declare(
            "CHECKPOINT_RESUME",
            "start over and move existing checkpoints aside, once: restarts resume, as do later starts of a named run "
            "where the variable requests it",
            False,
            parse=_parse_resume,
            format=_format_resume,
            default_text="no",
        )
    )
    save_at_end: bool = field(
        metadata=_declare(
            "REPRIEVE_SAVE_AT_END",
            "save the last step when training is finished (transformers.Trainer)",
            True,
            parse=parse_bool,
            is_option=False,
            default_text="true",
        )
    )
    grace_period: timedelta | None = field(
        metadata=_declare(
            "REPRIEVE_GRACE",
            "time from the stop signal until the job is killed",
            parse=_parse_duration,
            format=_format_seconds,
            metavar="DURATION",
            default_text="the platform's",
        )
    )
    kill_wait: timedelta = field(
        metadata=_declare(
            "REPRIEVE_KILL_WAIT",
            "time to keep training after the stop signal before saving",
            timedelta(0),
            parse=_parse_duration_or_zero,
            format=_format_seconds,
            metavar="DURATION",
            default_text="0",
        )
    )
    take_over: timedelta | None = field(
        metadata=_declare(
            "REPRIEVE_TAKE_OVER",
            "how long to wait for an earlier attempt that still uses the checkpoints",
            parse=_parse_duration_or_zero,
            format=_format_seconds,
            metavar="DURATION",
            default_text="60s, or the grace period + 10s if longer",
        )
    )
    name: str | None = field(
        metadata=_declare(
            "REPRIEVE_RUN",
            "name of the run, for status, pause, resume and logs",
            metavar="NAME",
            default_text="from the command and its folder",
        )
    )
    max_restarts: int = field(
        metadata=_declare(
            "REPRIEVE_RESTARTS",
            "how often to restart after failures, with growing delays; preemptions do not count",
            0,
            parse=_parse_count,
            metavar="N",
            default_text="0",
        )
    )
    hang_timeout: timedelta | None = field(
        metadata=_declare(
            "REPRIEVE_HANG",
            "time without a completed step after which to show the stacks of all ranks and restart",
            parse=_parse_duration,
            format=_format_seconds,
            metavar="DURATION",
            default_text="never",
        )
    )
    progress_file: str | None = field(
        metadata=_declare(
            "TRAINING_PROGRESS_FILE", "JSON file to write progress to", metavar="PATH", default_text="none"
        )
    )
    progress_every: int = field(
        metadata=_declare(
            "PROGRESS_UPDATE_FREQUENCY",
            "number of steps between two updates of the progress file",
            10,
            parse=_parse_steps,
            metavar="N",
            default_text="10",
        )
    )
    metrics_port: int | str = field(
        metadata=_declare(
            "REPRIEVE_METRICS_PORT",
            "HTTP port for progress as JSON and Prometheus metrics: a port, 0 (any), off, or auto (28080 in a pod)",
            AUTO,
            parse=_parse_port,
            metavar="PORT",
            default_text="auto",
        )
    )
    drill: str | None = field(
        metadata=_declare(DRILL, "scratch folder of a drill; set by reprieve drill", is_option=False)
    )
    sources: Mapping[str, str] = field(default_factory=dict)
    """Where each value comes from: an option, an argument, a variable or "default"."""

    def environment(self) -> dict[str, str]:
        """Return the variables for processes that the launcher starts: every setting that is not a default."""
        env = {
            setting.env: setting.format(getattr(self, name))
            for name, setting in SETTINGS.items()
            if self.sources[name] != "default" and getattr(self, name) is not None
        }
        if "CHECKPOINT_INTERVAL" in env:
            # The interval is complete now: these would change its meaning.
            env |= {"CHECKPOINT_STRATEGY": "", "CHECKPOINT_ENABLED": ""}
        return env

    def start_over(self, env: Mapping[str, str] = os.environ) -> str | None:
        """Return the id of the request to start over, which is carried out once; an empty text: it has none and is
        carried out at every start, as the script says; None: resume.

        Raises ConfigError in a pod whose environment requests it without a run name: each pod would start over.
        """
        if not self.fresh:
            return None
        if self.sources["fresh"] != SETTINGS["fresh"].env:
            return ""
        request = env.get(START_OVER) or self.name or ""
        if not request and in_pod(env) and self.drill is None:
            name, run = SETTINGS["fresh"].env, SETTINGS["name"].env
            raise ConfigError(
                f"{name}={env.get(name, '').strip()} without {run}: each start of this pod would move all checkpoints "
                f"away. Set {run} to a name that all pods of the job share: in a TrainJob by fieldRef to "
                "metadata.labels['jobset.sigs.k8s.io/jobset-uid'], as the runtime reprieve-torch does"
            )
        return request

    def options(self) -> dict[str, str]:
        """Return the text of each setting that was given as an option of the command line, `fresh` excepted."""
        return {
            name: setting.format(getattr(self, name))
            for name, setting in SETTINGS.items()
            if name != "fresh" and self.sources[name].startswith("--") and getattr(self, name) is not None
        }


SETTINGS: Mapping[str, Setting] = {
    entry.name: entry.metadata["setting"] for entry in fields(Settings) if "setting" in entry.metadata
}


def resolve(given: Mapping[str, Any], env: Mapping[str, str] = os.environ, *, options: bool = True) -> Settings:
    """Resolve all settings.

    `given`: arguments by name, None where there is none. Texts are parsed as in the environment. `options`: the
    arguments are options of a command line, not of a function; this only changes messages.
    """
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for name, setting in SETTINGS.items():
        argument = option_of(name) if options else f"{name}="
        value = given.get(name)
        if value is not None:
            values[name], sources[name] = _parse(setting.parse, value, argument), argument
        elif env.get(setting.env, "").strip() or (name == "every" and env.get("CHECKPOINT_STRATEGY", "").strip()):
            parse = setting.parse if name != "every" else lambda text: _parse_interval(text, env)
            values[name], sources[name] = _parse(parse, env.get(setting.env, ""), setting.env), setting.env
        else:
            values[name], sources[name] = setting.default, "default"
    enabled = env.get("CHECKPOINT_ENABLED", "")
    if given.get("every") is None and enabled.strip() and not _parse(parse_bool, enabled, "CHECKPOINT_ENABLED"):
        values["every"], sources["every"] = NEVER, "CHECKPOINT_ENABLED"
    is_first = options or env.get("RANK", "0") == "0"
    """Log once, not on each rank."""
    uri = env.get("CHECKPOINT_URI", "").strip()
    if (
        is_first
        and uri
        and sources["checkpoints"] == "checkpoints="
        and values["checkpoints"].rstrip("/") != uri.rstrip("/")
    ):
        # In a pod, the folder of the script may not be in the volume.
        log.warning(
            "checkpoints go to %s, as the script says, and not to CHECKPOINT_URI=%s", values["checkpoints"], uri
        )
    if values["fallback"] is not None and is_object_store(values["checkpoints"]):
        if is_first:
            text = "this version does not write to %s: checkpoints go to %s (%s)"
            log.warning(text, values["checkpoints"], values["fallback"], SETTINGS["fallback"].env)
        values["checkpoints"], sources["checkpoints"] = values["fallback"], SETTINGS["fallback"].env
    save_type = _parse(_check_save_type, env.get("CHECKPOINT_SAVE_TYPE", ""), "CHECKPOINT_SAVE_TYPE")
    if save_type == "incremental" and not options and env.get("RANK", "0") == "0":  # once, and not in the launcher
        log.warning("CHECKPOINT_SAVE_TYPE=incremental is not supported: each checkpoint is saved whole")
    return Settings(**values, sources=sources)


def is_object_store(uri: str | None) -> bool:
    """Return whether a checkpoint folder is in an object store, which this version does not write to."""
    return uri is not None and "://" in uri and not uri.startswith("file://")


def _parse(parse: Callable[[Any], Any], value: Any, source: str) -> Any:
    if not isinstance(value, str) and parse not in (_parse_duration, _parse_duration_or_zero):
        return value
    try:
        return parse(value)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None


def _parse_interval(text: str, env: Mapping[str, str]) -> str:
    """Return CHECKPOINT_INTERVAL with the unit that CHECKPOINT_STRATEGY gives to a bare number."""
    strategy, text = env.get("CHECKPOINT_STRATEGY", "").strip().lower(), text.strip()
    if strategy not in ("", "steps", "epoch", "time"):
        raise ConfigError(f"CHECKPOINT_STRATEGY={strategy!r}: write steps, epoch or time")
    if strategy == "epoch":
        return "epoch"
    if not text:
        return "10m" if strategy == "time" else "500"
    if strategy == "steps" and text != NEVER and not re.fullmatch(r"\d+(\s*steps?)?", text):
        raise ConfigError(
            f"{text!r} is not a number of steps, which CHECKPOINT_STRATEGY=steps needs: write CHECKPOINT_INTERVAL=500, "
            f"or CHECKPOINT_STRATEGY=time with CHECKPOINT_INTERVAL=10m"
        )
    return f"{text}s" if strategy == "time" and text.isdigit() else text
