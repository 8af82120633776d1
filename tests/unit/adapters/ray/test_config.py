"""The settings of a run on Ray: defaults, bad values, and what travels from the driver."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray.train

from reprieve.adapters.ray.callback import JITCheckpointCallback
from reprieve.adapters.ray.config import JITCheckpointConfig, RunConfig, resolve_config
from reprieve.adapters.ray.driver import protect
from reprieve.errors import ConfigError


@pytest.fixture(autouse=True)
def _no_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("REPRIEVE_GRACE", raising=False)


def callbacks(run_config: Any) -> list[JITCheckpointCallback]:
    return [each for each in run_config.callbacks if isinstance(each, JITCheckpointCallback)]


def test_the_defaults_are_those_of_the_document() -> None:
    assert dataclasses.asdict(JITCheckpointConfig()) == {
        "enabled": False,
        "kill_wait": 3.0,
        "grace": None,
        "signals": ("SIGTERM",),
    }


@pytest.mark.parametrize("wait", [-1, -0.5, float("nan"), float("inf"), "3", None, True], ids=str)
def test_a_bad_kill_wait_is_refused_with_its_value(wait: Any) -> None:
    with pytest.raises(ConfigError, match="write a number of seconds, 0 or more") as refused:
        JITCheckpointConfig(kill_wait=wait)
    assert f"kill_wait={wait!r}" in str(refused.value)


@pytest.mark.parametrize("wait", [30, 31, 30.0])
def test_a_kill_wait_that_leaves_no_time_to_save_is_refused(wait: float) -> None:
    with pytest.raises(ConfigError, match=r"the grace period is 30 s \(as given\), so no time would be left to save"):
        JITCheckpointConfig(enabled=True, kill_wait=wait, grace="30s")


def test_the_grace_period_of_the_environment_counts_for_kill_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REPRIEVE_GRACE", "2")
    with pytest.raises(ConfigError, match="REPRIEVE_GRACE"):
        JITCheckpointConfig(enabled=True)
    JITCheckpointConfig(enabled=False)  # it has no effect


def test_a_default_of_the_platform_does_not_limit_kill_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")  # its default is 30 s
    JITCheckpointConfig(enabled=True, kill_wait=60)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"grace": "soon"}, "'soon' is not a duration"),
        ({"grace": 0}, "must be more than zero"),
        ({"grace": float("nan")}, "not a duration"),
        ({"signals": ("SIGNOTHING",)}, "'SIGNOTHING' is not a signal"),
        ({"signals": ("SIGKILL",)}, "SIGKILL cannot be handled"),
    ],
    ids=str,
)
def test_other_bad_values_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        JITCheckpointConfig(enabled=True, **options)


@pytest.mark.parametrize("signals", ["SIGTERM", None, 15], ids=str)
def test_signals_that_are_no_list_are_refused_as_a_whole(signals: Any) -> None:
    with pytest.raises(ConfigError, match=rf"signals={signals!r}: write \('SIGTERM',\)"):
        JITCheckpointConfig(signals=signals)


# What travels


def test_the_drivers_environment_travels() -> None:
    env = {"REPRIEVE_GRACE": "120", "CHECKPOINT_INTERVAL": "7", "CHECKPOINT_STRATEGY": "steps", "HOME": "/root"}
    resolved = resolve_config(JITCheckpointConfig(enabled=True), env)
    assert resolved.grace.certain and resolved.grace.period is not None
    assert resolved.grace.period.total_seconds() == 120
    assert resolved.environment["CHECKPOINT_INTERVAL"].startswith("7")
    # It was part of the interval: on a local cluster, workers inherit it, and would apply it again.
    assert resolved.environment["CHECKPOINT_STRATEGY"] == ""
    assert not {"HOME", "REPRIEVE_GRACE"} & set(resolved.environment)


def test_a_relative_folder_of_the_environment_is_refused() -> None:
    """Ray changes the working directory of each worker."""
    with pytest.raises(ConfigError, match="CHECKPOINT_URI='checkpoints' is relative, and Ray changes the working dir"):
        resolve_config(JITCheckpointConfig(enabled=True), {"CHECKPOINT_URI": "checkpoints"})
    for folder in ("/nfs/checkpoints", "file:///nfs/checkpoints", "~/checkpoints"):
        env = {"CHECKPOINT_URI": folder}
        assert resolve_config(JITCheckpointConfig(), env).environment["CHECKPOINT_URI"] == folder


def test_settings_of_the_launcher_stay_behind() -> None:
    resolved = resolve_config(JITCheckpointConfig(), {"REPRIEVE_RESTARTS": "5", "REPRIEVE_KILL_WAIT": "9s"})
    assert dict(resolved.environment) == {}
    assert resolved.kill_wait_s == 3.0


@pytest.mark.parametrize("env", [{"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, {"SLURM_JOB_ID": "7"}], ids=str)
def test_a_guessed_grace_period_never_becomes_a_deadline(env: dict[str, str]) -> None:
    grace = resolve_config(JITCheckpointConfig(), env).grace
    assert grace.period is None and not grace.certain


def test_a_given_grace_period_wins() -> None:
    grace = resolve_config(JITCheckpointConfig(grace=45), {"REPRIEVE_GRACE": "120"}).grace
    assert grace.certain and grace.period is not None and grace.period.total_seconds() == 45


# RunConfig


def test_run_config_is_rays_with_one_field_more(tmp_path: Path) -> None:
    config = RunConfig(name="x", storage_path=str(tmp_path), jit_checkpoint_config=JITCheckpointConfig(enabled=True))
    assert isinstance(config, ray.train.RunConfig)
    assert (config.name, config.storage_path) == ("x", str(tmp_path))
    assert len(callbacks(config)) == 1


@pytest.mark.parametrize("jit", [None, JITCheckpointConfig()], ids=["none", "disabled"])
def test_a_run_that_is_not_enabled_gets_no_callback(jit: JITCheckpointConfig | None) -> None:
    assert RunConfig(jit_checkpoint_config=jit).callbacks == []


def test_callbacks_of_the_user_stay_first() -> None:
    user = ray.train.UserCallback()
    given = [user]
    config = RunConfig(callbacks=given, jit_checkpoint_config=JITCheckpointConfig(enabled=True))
    assert config.callbacks[0] is user and len(config.callbacks) == 2
    assert given == [user], "the user's list was changed"


def test_several_ways_at_once_protect_once() -> None:
    config = RunConfig(jit_checkpoint_config=JITCheckpointConfig(enabled=True, kill_wait=1))
    trainer = SimpleNamespace(run_config=config)
    assert protect(trainer) is trainer
    protect(trainer, JITCheckpointConfig(enabled=True, kill_wait=9))
    (callback,) = callbacks(config)
    assert callback.config.kill_wait_s == 1


def test_protect_adds_the_callback_to_a_plain_run_config() -> None:
    trainer = SimpleNamespace(run_config=ray.train.RunConfig())
    protect(trainer)
    (callback,) = callbacks(trainer.run_config)
    assert callback.config.kill_wait_s == 3.0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "variables"),
    [
        (
            "from reprieve.ray import JITCheckpointConfig, RunConfig\n"
            "RunConfig(jit_checkpoint_config=JITCheckpointConfig(enabled=True))",
            {"CHECKPOINT_URI": "relative"},
        ),
        ("import reprieve.ray", {"RAY_TRAIN_V2_ENABLED": "0"}),
    ],
    ids=["a relative folder", "Train V1"],
)
def test_a_bad_setting_is_a_permanent_failure(code: str, variables: dict[str, str], tmp_path: Path) -> None:
    log = tmp_path / "exit-message"
    log.touch()
    env = {**os.environ, "REPRIEVE_TERMINATION_LOG": str(log), **variables}
    ended = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert ended.returncode == 42, ended.stderr
    assert "ConfigError" in json.loads(log.read_text())["message"], log.read_text()
