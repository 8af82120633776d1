"""How a run on Ray is protected: `JITCheckpointConfig`, and a `RunConfig` that takes one.

Ray passes none of our environment variables on to its workers. So the settings are resolved in the driver, and travel
with the callback (`callback.py`).
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import ray.train

from reprieve.adapters.ray.internals import check_version
from reprieve.errors import ConfigError
from reprieve.preemption.deadline import Grace, resolve_grace_period
from reprieve.preemption.stop_listener import signal_number
from reprieve.session.startup_errors import reporting_startup_errors
from reprieve.settings import resolve

_OF_ONE_PROCESS = {"REPRIEVE_RESTARTS", "REPRIEVE_HANG", "REPRIEVE_GRACE", "REPRIEVE_KILL_WAIT"}
"""Settings of the launcher, and those that `JITCheckpointConfig` has."""


@dataclass(frozen=True)
class JITCheckpointConfig:
    """Save a checkpoint when a run is requested to stop."""

    enabled: bool = False
    kill_wait: float = 3.0
    """Seconds to keep training after a SIGTERM to a worker, in case a SIGKILL follows at once. Cut short by the
    deadline; 0 turns it off. A drained node and a stopped driver do not wait."""
    grace: str | float | timedelta | None = None
    """Time from the stop request to the kill. Default: `REPRIEVE_GRACE` in the driver's environment, else unknown."""
    signals: tuple[str, ...] = ("SIGTERM",)
    """The signals that stop a worker or the driver."""

    def __post_init__(self) -> None:
        with reporting_startup_errors():
            check_version()
            self._check()

    def _check(self) -> None:
        wait = self.kill_wait
        if isinstance(wait, bool) or not isinstance(wait, int | float) or not math.isfinite(wait) or wait < 0:
            raise ConfigError(f"kill_wait={wait!r}: write a number of seconds, 0 or more")
        if not isinstance(self.signals, tuple | list):
            name = self.signals if isinstance(self.signals, str) else "SIGTERM"
            raise ConfigError(f"signals={self.signals!r}: write ({name!r},)")
        for name in self.signals:
            signal_number(name)
        grace = resolve_grace_period(self.grace)
        if self.enabled and grace.certain and grace.period is not None and wait >= grace.period.total_seconds():
            raise ConfigError(
                f"kill_wait={wait:g}: the grace period is {grace}, so no time would be left to save. Use a shorter "
                "kill_wait, or a longer grace period"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedConfig:
    """The settings of a run, as they travel from the driver to controller and workers."""

    kill_wait_s: float
    grace: Grace
    signals: tuple[str, ...]
    environment: Mapping[str, str]
    """Variables for the workers: the settings of the driver's environment."""


def resolve_config(config: JITCheckpointConfig, env: Mapping[str, str] = os.environ) -> ResolvedConfig:
    """Resolve all settings. In the driver."""
    grace = resolve_grace_period(config.grace, env)
    settings = resolve({}, env)
    if settings.checkpoints is not None:
        check_absolute(settings.checkpoints, "CHECKPOINT_URI=")
    return ResolvedConfig(
        kill_wait_s=float(config.kill_wait),
        # A deadline that is only a guess would cut a save short for nothing.
        grace=grace if grace.certain else Grace(None, "no grace period is configured for this run on Ray"),
        signals=config.signals,
        environment={name: value for name, value in settings.environment().items() if name not in _OF_ONE_PROCESS},
    )


def check_absolute(folder: str, source: str = "") -> None:
    """Refuse a relative checkpoint folder. `source`: what stands before it in the message."""
    if "://" not in folder and not Path(folder).expanduser().is_absolute():
        raise ConfigError(
            f"{source}{folder!r} is relative, and Ray changes the working directory: write an absolute path, or leave "
            "it out to use Ray's folder of the run"
        )


@dataclass
class RunConfig(ray.train.RunConfig):
    """Ray's `RunConfig`, with `jit_checkpoint_config`."""

    jit_checkpoint_config: JITCheckpointConfig | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.jit_checkpoint_config is not None and self.jit_checkpoint_config.enabled:
            from reprieve.adapters.ray.driver import add_callback

            add_callback(self, self.jit_checkpoint_config)
