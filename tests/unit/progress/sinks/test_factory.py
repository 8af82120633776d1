"""The sinks that settings and environment request."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from reprieve.progress.publisher import Publisher
from reprieve.progress.sinks import terminal_bar
from reprieve.progress.sinks.factory import make_sinks
from reprieve.progress.tracker import Tracker
from reprieve.settings import resolve
from tests.support.progress_kit import wait_until

POD = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "POD_IP": "127.0.0.2"}
NO_LOG = {"REPRIEVE_TERMINATION_LOG": "/no/such/log"}

pytestmark = pytest.mark.usefixtures("patient")


def names(env: dict[str, str], given: dict[str, Any] | None = None) -> list[str]:
    return [sink.name for sink in make_sinks(resolve(given or {}, env), {**NO_LOG, **env})]


def test_nothing_is_told_where_nobody_asked() -> None:
    assert names({}) == []


def test_everything_that_was_asked_for(tmp_path: Path) -> None:
    (tmp_path / "log").touch()
    env = {
        "TRAINING_PROGRESS_FILE": f"{tmp_path}/p.json", "REPRIEVE_METRICS_PORT": "9100",
        "REPRIEVE_TERMINATION_LOG": f"{tmp_path}/log", "KUBEFLOW_TRAINER_SERVER_URL": "https://trainer.example.com/x",
    }  # fmt: skip
    assert names(env) == [
        f"the progress file {tmp_path}/p.json",
        "the HTTP server on port 9100",
        "Kubeflow's status server trainer.example.com",
        f"the termination log {tmp_path}/log",
    ]


@pytest.mark.parametrize(
    ("env", "given", "found"),
    [
        ({}, {}, []),
        (POD, {}, ["the HTTP server on port 28080"]),
        ({**POD, "REPRIEVE_METRICS_PORT": "off"}, {}, []),
        (POD, {"metrics_port": "off"}, []),
        ({**POD, "REPRIEVE_METRICS_PORT": "9100"}, {}, ["the HTTP server on port 9100"]),
        ({}, {"metrics_port": 0}, ["the HTTP server on port 0"]),
        ({"REPRIEVE_METRICS_PORT": "auto"}, {}, []),
    ],
)
def test_where_there_is_a_server(env: dict[str, str], given: dict[str, Any], found: list[str]) -> None:
    assert names(env, given) == found


def test_a_drill_tells_nothing(tmp_path: Path) -> None:
    env = {**POD, "TRAINING_PROGRESS_FILE": "p.json", "KUBEFLOW_TRAINER_SERVER_URL": "https://x"}
    assert len(names(env)) == 3
    assert names({**env, "REPRIEVE_DRILL": str(tmp_path)}) == []


def test_a_bar_is_drawn_where_one_is_wanted_and_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    from rich.console import Console

    def found(wanted: bool) -> list[str]:
        return [sink.name for sink in make_sinks(resolve({}, {}), NO_LOG, bar=wanted)]

    monkeypatch.setattr(terminal_bar, "terminal", lambda: None)
    assert found(True) == []
    monkeypatch.setattr(terminal_bar, "terminal", Console)
    assert (found(True), found(False)) == (["the progress bar"], [])


def test_from_the_environment_to_the_file(tmp_path: Path) -> None:
    env = {**NO_LOG, "TRAINING_PROGRESS_FILE": f"{tmp_path}/p.json", "PROGRESS_UPDATE_FREQUENCY": "1"}
    tracker = Tracker(total_steps=10)
    with Publisher.from_environment(tracker, env=env):
        tracker.step(5)
        tracker.stopped("SIGTERM", saved=False)
    content = json.loads((tmp_path / "p.json").read_text())
    assert (content["step"], content["state"], content["saved"], content["percentComplete"]) == (
        5,
        "stopped",
        False,
        "50.0",
    )


def test_a_port_in_use_is_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with Publisher.from_environment(Tracker(), resolve({"metrics_port": port}, {}), env=NO_LOG):
            wait_until(lambda: caplog.records)
    assert [(sink.levelname, f"port {port} is in use" in sink.getMessage()) for sink in caplog.records] == [
        ("WARNING", True)
    ]


def test_torch_is_not_imported() -> None:
    import subprocess
    import sys

    code = (
        "import sys; from reprieve.progress.publisher import Publisher; from reprieve.progress.tracker import Tracker; "
        "import reprieve.progress.sinks.http, reprieve.progress.sinks.kubeflow, reprieve.progress.sinks.terminal_bar; "
        "assert not {'torch', 'numpy', 'rich'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
