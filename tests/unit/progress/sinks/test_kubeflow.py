"""The status that is pushed to Kubeflow Trainer's status server."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from reprieve.progress.publisher import Publisher
from reprieve.progress.sinks.kubeflow import KubeflowError, KubeflowSink, body
from reprieve.progress.snapshot import Checkpoints, Progress
from reprieve.progress.tracker import Tracker
from tests.support.helpers import FakeClock
from tests.support.progress_kit import ODD_NAME, ODD_NUMBERS, progress, strict_json
from tests.support.status_server import MAX_BYTES, StatusServer

pytestmark = pytest.mark.usefixtures("patient")


@pytest.fixture
def server() -> Iterator[StatusServer]:
    server = StatusServer()
    yield server
    server.close()


def status(data: str | bytes) -> dict[str, Any]:
    content = strict_json(data)
    assert list(content) == ["trainerStatus"]
    found: dict[str, Any] = content["trainerStatus"]
    assert all(set(metric) == {"name", "value"} for metric in found["metrics"])
    assert all(isinstance(metric["value"], str) and metric["value"] and metric["name"] for metric in found["metrics"])
    return {**found, "metrics": {metric["name"]: metric["value"] for metric in found["metrics"]}}


def test_what_is_pushed() -> None:
    assert status(body(progress())) == {
        "progressPercentage": 50, "estimatedRemainingSeconds": 91, "lastUpdatedTime": "2023-11-14T22:13:20Z",
        "metrics": {
            "state": "training", "currentStep": "150", "totalSteps": "300", "currentEpoch": "1.50", "totalEpochs": "3",
            "resumedFrom": "100", "restarts": "2", "latestCheckpoint": "/workspace/checkpoints/checkpoint-150",
            "checkpointsCreated": "3", "loss": "0.45231", "learning_rate": "5e-05", "eval_loss": "0.5",
        },
    }  # fmt: skip


def test_what_is_not_known_is_left_out() -> None:
    content = status(body(Progress(at=0.0)))
    assert set(content) == {"lastUpdatedTime", "metrics"}
    assert set(content["metrics"]) == {"state", "currentStep"}


def test_a_run_that_was_stopped_is_not_complete() -> None:
    content = status(body(progress(state="stopped", percent=99.9, eta_s=1.0)))
    assert (content["progressPercentage"], content["estimatedRemainingSeconds"]) == (99, 1)


def test_it_is_never_too_large() -> None:
    many = {f"{number}{ODD_NAME * 40}": 1.0 for number in range(2000)}
    data = body(progress(train={**ODD_NUMBERS, **many}))
    assert len(data) <= MAX_BYTES
    assert status(data)["metrics"]["nan"] == "NaN"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_sdks_own_client_says_it_in_the_same_way(
    server: StatusServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A controller accepts what a release of the SDK sends."""
    from kubeflow.trainer import update_trainjob_status

    environment = server.environment(tmp_path)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    KubeflowSink(environment).update(progress())
    pushed = status(server.bodies[0])
    assert update_trainjob_status(pushed["progressPercentage"], pushed["estimatedRemainingSeconds"], pushed["metrics"])
    sdk_status = status(server.bodies[1])
    for content in (pushed, sdk_status):
        datetime.fromisoformat(content.pop("lastUpdatedTime").replace("Z", "+00:00"))
    assert pushed == sdk_status


# How often


def test_not_more_often_than_every_ten_seconds(server: StatusServer, tmp_path: Path, clock: FakeClock) -> None:
    sink = KubeflowSink(server.environment(tmp_path), clock=clock)
    for step in range(60):
        sink.update(progress(step=step))
        clock.advance(1.0)
    assert [status(request)["metrics"]["currentStep"] for request in server.bodies] == [
        "0",
        "10",
        "20",
        "30",
        "40",
        "50",
    ]


def test_less_and_less_often_while_it_fails(server: StatusServer, tmp_path: Path, clock: FakeClock) -> None:
    sink = KubeflowSink(server.environment(tmp_path), clock=clock)
    server.status = 429
    tried = []
    for second in range(1500):
        before = len(server.refused)
        try:
            sink.update(progress())
        except KubeflowError:
            tried.append(second)
        assert len(server.refused) == before + (bool(tried) and tried[-1] == second)
        clock.advance(1.0)
    assert tried == [0, 20, 60, 140, 300, 600, 900, 1200]
    server.status = 200
    clock.advance(300.0)
    sink.update(progress())
    clock.advance(10.0)
    sink.update(progress())
    assert len(server.bodies) == 2


@pytest.mark.parametrize("how", ["update", "close"])
def test_the_end_is_told_at_once(server: StatusServer, tmp_path: Path, clock: FakeClock, how: str) -> None:
    sink = KubeflowSink(server.environment(tmp_path), clock=clock)
    sink.update(progress())
    for _ in range(3):
        getattr(sink, how)(progress(state="stopped", step=151))
        if how == "close":
            break
    assert [status(request)["metrics"]["currentStep"] for request in server.bodies] == ["150", "151"]


def test_a_server_that_does_not_answer_holds_up_neither_training_nor_its_end(
    server: StatusServer, tmp_path: Path
) -> None:
    server.hang.clear()
    tracker = Tracker(total_steps=100)
    publisher = Publisher(tracker, [KubeflowSink(server.environment(tmp_path))]).start()
    for step in range(100):
        tracker.step(step)
    publisher.close(timeout_s=0.2)
    server.hang.set()


def test_a_checkpoint_path_is_told_as_it_is() -> None:
    content = status(body(progress(checkpoints=Checkpoints(latest="/größe/checkpoint-1", created=1))))
    assert content["metrics"]["latestCheckpoint"] == "/größe/checkpoint-1"
