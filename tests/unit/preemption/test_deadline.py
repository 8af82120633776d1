"""The grace period: how long a process has after a stop request, and where that comes from."""

from __future__ import annotations

from datetime import timedelta

import pytest

from reprieve.errors import ConfigError
from reprieve.preemption.deadline import NO_LIMIT_S, Grace, resolve_grace_period, take_over_wait
from reprieve.preemption.stop_listener import signal_number


@pytest.mark.parametrize(
    ("given", "env", "seconds", "certain"),
    [
        ("2m", {"REPRIEVE_GRACE": "10"}, 120, True),
        (None, {"REPRIEVE_GRACE": "10", "KUBERNETES_SERVICE_HOST": "10.0.0.1"}, 10, True),
        (None, {"REPRIEVE_GRACE": "1m30s"}, 90, True),
        (None, {"REPRIEVE_GRACE": "2.5"}, 2.5, True),
        (None, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, 30, False),
        (None, {"SLURM_JOB_ID": "7"}, 30, False),
        (None, {"TORCHELASTIC_RUN_ID": "x"}, 30, False),
        (None, {"TORCHELASTIC_RUN_ID": "x", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "300"}, 300, False),
        (None, {"TORCHELASTIC_RUN_ID": "x", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "300", "SLURM_JOB_ID": "7"}, 30, False),
        (None, {"TORCHELASTIC_RUN_ID": "x", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(NO_LIMIT_S)}, None, False),
        (None, {}, None, False),
    ],
)
def test_who_says_how_long(given: str | None, env: dict[str, str], seconds: float | None, certain: bool) -> None:
    grace = resolve_grace_period(given, env)
    assert grace.period == (None if seconds is None else timedelta(seconds=seconds))
    assert grace.certain is certain


@pytest.mark.parametrize("text", ["soon", "-3", "0"])
def test_nonsense_is_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError, match="REPRIEVE_GRACE"):
        resolve_grace_period(None, {"REPRIEVE_GRACE": text})


@pytest.mark.parametrize(
    ("configured", "grace", "seconds"), [(None, None, 60), (None, 30, 60), (None, 118, 128), (5, 118, 5), (0, None, 0)]
)
def test_an_earlier_attempt_may_use_its_whole_grace_period(
    configured: float | None, grace: float | None, seconds: float
) -> None:
    known = Grace(None if grace is None else timedelta(seconds=grace), "as given")
    wait = take_over_wait(None if configured is None else timedelta(seconds=configured), known)
    assert wait == timedelta(seconds=seconds)


def test_it_reads_as_a_sentence() -> None:
    assert str(Grace(timedelta(seconds=30), "as given")) == "30 s (as given)"
    assert str(resolve_grace_period(None, {})) == "no limit is known (set REPRIEVE_GRACE if there is one)"


def test_signals_by_name_and_number() -> None:
    assert signal_number("SIGUSR1") == signal_number("USR1") == signal_number(10) == 10
    for bad in ("SIGNOTHING", 0, 999):
        with pytest.raises(ConfigError, match="is not a signal"):
            signal_number(bad)
    with pytest.raises(ConfigError, match="cannot be handled"):
        signal_number("SIGKILL")
