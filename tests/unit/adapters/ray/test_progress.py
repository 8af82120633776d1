"""The progress of a run on Ray, across the generations of its workers."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from ray.util.metrics import Gauge

from reprieve.adapters.ray.config import JITCheckpointConfig, resolve_config
from reprieve.adapters.ray.progress import PROGRESS, RayMetrics, RunProgress, step_of
from reprieve.progress.snapshot import Progress
from reprieve.run_state import RunState
from tests.support.memory_store import MemoryStore


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def run(store: MemoryStore, tmp_path: Path) -> Iterator[RunProgress]:
    """The progress of a run whose first workers have started, and which has a progress file."""
    env = {"TRAINING_PROGRESS_FILE": str(tmp_path / "progress.json"), "PROGRESS_UPDATE_FREQUENCY": "1"}
    run = RunProgress(resolve_config(JITCheckpointConfig(enabled=True), env), store)
    run.generation_started(1)
    yield run
    run.close(RunState.STOPPED)


def until(is_true: Callable[[], object]) -> None:
    end = time.monotonic() + 20
    while not is_true():
        assert time.monotonic() < end
        time.sleep(0.01)


def received(store: MemoryStore, run: RunProgress, generation: int, **progress: Any) -> None:
    """Rank 0 of a generation reports."""
    sent = Progress(at=time.time(), **progress)
    store.set(f"{generation}/{PROGRESS}", sent.to_json())
    until(lambda: run.snapshot().step == sent.step and run._received is not None and run._received.at == sent.at)


def test_reports_to_ray_are_the_progress_of_a_function_that_saves_by_itself(run: RunProgress) -> None:
    run.reported({"step": 6, "loss": 0.5, "note": "text"}, None)
    progress = run.snapshot()
    assert (progress.step, progress.loss, progress.state, progress.restarts) == (6, 0.5, RunState.TRAINING, 0)


@pytest.mark.parametrize(
    ("metrics", "step"),
    [
        ({"epoch": 1.25}, 1),
        ({"step": numpy.int64(7)}, 7),
        ({"step": numpy.float32(7.5)}, 7),
        ({"step": torch.tensor(7)}, 7),
        ({"step": None, "epoch": 2}, 2),
        ({"step": "seven", "global_step": True, "training_iteration": float("nan"), "epoch": 3}, 3),
        ({"step": numpy.bool_(True), "global_step": torch.tensor(True), "epoch": float("inf")}, None),
        ({"step": torch.zeros(2), "global_step": "7"}, None),
        ({"loss": 0.5}, None),
    ],
    ids=str,
)
def test_the_step_of_a_report_is_a_whole_number_or_unknown(metrics: dict[str, Any], step: int | None) -> None:
    assert step_of(metrics) == step
    assert type(step_of(metrics)) is type(step)


def test_a_report_whose_step_is_no_number_is_counted(run: RunProgress) -> None:
    run.reported({"step": "first", "epoch": float("nan")}, None)
    run.reported({"step": float("inf"), "loss": numpy.float32(0.5)}, None)
    progress = run.snapshot()
    assert (progress.step, progress.epoch, progress.loss) == (2, None, 0.5)


def test_it_resumes_from_the_checkpoint_that_ray_has_not_from_the_last_step(run: RunProgress) -> None:
    run.reported({"step": 4}, "/run/checkpoint_4")
    run.reported({"step": 6}, None)
    run.generation_started(2)
    progress = run.snapshot()
    assert (progress.state, progress.restarts, progress.resumed_from) == (RunState.WAITING, 1, 4)
    run.reported({"step": 5}, None)
    assert run.snapshot().state == RunState.TRAINING
    assert run.snapshot().checkpoints.latest == "/run/checkpoint_4"


def test_it_resumes_from_nothing_if_nothing_was_saved(run: RunProgress) -> None:
    run.reported({"step": 6}, None)
    run.generation_started(2)
    assert run.snapshot().resumed_from is None


def test_a_new_driver_resumes_from_the_checkpoint_of_the_one_before(run: RunProgress, store: MemoryStore) -> None:
    run.resumed_from = 30
    run.reported({"step": 31}, None)
    assert run.snapshot().resumed_from == 30
    run.generation_started(2)
    assert run.snapshot().resumed_from == 30, "nothing was saved since"
    received(store, run, 2, step=20, state=RunState.TRAINING, resumed_from=None)
    assert run.snapshot().resumed_from is None, "a session has started over"


def test_a_session_in_rank_0_reports_through_the_store(run: RunProgress, store: MemoryStore) -> None:
    received(store, run, 1, step=8, state=RunState.TRAINING)
    assert run.snapshot().state == RunState.TRAINING
    received(store, run, 1, step=9, state=RunState.STOPPED, reason="SIGTERM", saved=True)
    assert run.snapshot().state == RunState.WAITING, "its workers have stopped, and the run continues"
    run.generation_started(2)
    assert run.snapshot().state == RunState.WAITING
    received(store, run, 2, step=10, state=RunState.TRAINING, resumed_from=9)
    progress = run.snapshot()
    assert (progress.state, progress.restarts, progress.resumed_from) == (RunState.TRAINING, 1, 9)


def test_the_end_of_the_run_is_published(run: RunProgress, tmp_path: Path) -> None:
    file = tmp_path / "progress.json"
    run.reported({"step": 4}, "/run/checkpoint_4")
    run.generation_started(2)
    until(lambda: file.exists() and json.loads(file.read_bytes())["state"] == "waiting to restart")
    run.close(RunState.STOPPED, "SIGTERM to the driver")
    assert run.ended
    content = json.loads(file.read_bytes())
    assert (content["state"], content["reason"], content["restarts"]) == ("stopped", "SIGTERM to the driver", 1)


def test_the_driver_reads_it_for_the_launcher(run: RunProgress, store: MemoryStore) -> None:
    run.reported({"step": 12}, None)
    until(lambda: store.get(PROGRESS) is not None and Progress.from_json(store.get(PROGRESS) or b"").step == 12)


def test_rays_own_metrics_get_what_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    values: dict[str, float] = {}
    monkeypatch.setattr(Gauge, "set", lambda gauge, value: values.__setitem__(gauge.info["name"], value))
    RayMetrics().update(Progress(at=0, step=7, restarts=2))
    assert values == {"reprieve_step": 7, "reprieve_restarts": 2}
