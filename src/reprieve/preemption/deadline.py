"""The grace period: how long a process has after a stop request.

It comes from an argument, from `REPRIEVE_GRACE`, or from the defaults of the platform that kills the process. It
counts from the signal.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

from reprieve.errors import ConfigError
from reprieve.host import in_pod
from reprieve.units import parse_duration

_THIRTY = timedelta(seconds=30)
NO_LIMIT_S = 7 * 86400
"""The timeout that `reprieve run` gives torchrun where no limit is known: torchrun has no value for "never"."""
_TAKE_OVER = timedelta(seconds=60)
_TAKE_OVER_MARGIN = timedelta(seconds=10)
"""From the end of the earlier attempt's grace period until nothing of it is left."""


@dataclass(frozen=True, slots=True)
class Grace:
    """A grace period, and where it comes from."""

    period: timedelta | None
    """None: nothing is known to kill this process."""
    source: str
    certain: bool = False
    """Configured for this job; otherwise only a default of the platform."""

    def __str__(self) -> str:
        if self.period is None:
            return f"no limit is known ({self.source})"
        return f"{self.period.total_seconds():g} s ({self.source})"


def resolve_grace_period(given: str | float | timedelta | None = None, env: Mapping[str, str] = os.environ) -> Grace:
    """Return the grace period: `given`, else `REPRIEVE_GRACE`, else the shortest default of the platforms here."""
    if given is not None:
        return Grace(parse_duration(given), "as given", certain=True)
    if text := env.get("REPRIEVE_GRACE"):
        try:
            # A bare number of seconds, as Kubernetes writes it, or "2m".
            period = parse_duration(float(text) if text.replace(".", "", 1).isdigit() else text)
            return Grace(period, "REPRIEVE_GRACE", certain=True)
        except ConfigError as error:
            raise ConfigError(f"REPRIEVE_GRACE: {error}") from None
    known = []
    if "TORCHELASTIC_RUN_ID" in env:
        text = env.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "")
        period = timedelta(seconds=float(text)) if text.isdigit() and int(text) else _THIRTY
        if period.total_seconds() < NO_LIMIT_S:
            known.append(Grace(period, "torchrun kills its workers then"))
    if in_pod(env):
        known.append(Grace(_THIRTY, "Kubernetes' default: set REPRIEVE_GRACE if the pod's differs"))
    if "SLURM_JOB_ID" in env:
        known.append(Grace(_THIRTY, "Slurm's default KillWait: set REPRIEVE_GRACE if it differs"))
    return min(
        known,
        key=lambda grace: grace.period or timedelta.max,
        default=Grace(None, "set REPRIEVE_GRACE if there is one"),
    )


def take_over_wait(configured: timedelta | None, grace: Grace) -> timedelta:
    """Return how long to wait for an earlier attempt of the run: it may use its whole grace period to save."""
    if configured is not None:
        return configured
    return max(_TAKE_OVER, (grace.period or timedelta(0)) + _TAKE_OVER_MARGIN)
