"""`reprieve.ray.Run` starts over once for each `fit()`, and moves nothing that Ray needs."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import ray.train
import torch

from reprieve.adapters.ray import internals
from reprieve.adapters.ray.internals import CHECKPOINT_MANAGER_SNAPSHOT_FILENAME, WorkerContext
from reprieve.adapters.ray.run import Run
from reprieve.preemption.deadline import Grace
from reprieve.preemption.process_exit import Preempted, process_exit
from reprieve.preemption.process_host import StopRequest, StopRequestListener
from reprieve.testing import run_ranks


def train(folder: Path, run_id: str, steps: int, fresh: bool | None) -> int:
    """Train in a worker of this `fit()`. Returns the step that it began with."""
    context = WorkerContext(rank=0, world_size=1, local_rank=0, run_name="run", run_id=run_id, folder=folder)
    internals.worker_context = lambda: context
    ray.train.report = lambda *arguments, **options: None
    run = Run(model=torch.nn.Linear(1, 1), every=1, fresh=fresh, notices="off")
    began = run.steps
    for _ in run.epochs(steps=steps):
        for _ in run.batches(range(100)):
            run.step()
    return began


def began(folder: Path, run_id: str, steps: int, fresh: bool | None) -> int:
    [result] = run_ranks(1, train, folder, run_id, steps, fresh, backend=None)
    assert result.error is None, result.output
    return int(result.value)


def test_only_the_first_generation_starts_over(tmp_path: Path) -> None:
    assert began(tmp_path, "first", 3, None) == 0
    assert began(tmp_path, "second", 2, True) == 0
    assert began(tmp_path, "second", 4, True) == 2
    assert began(tmp_path, "third", 1, True) == 0


def test_the_drivers_folder_is_the_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHECKPOINT_URI", str(tmp_path / "of the driver"))
    [result] = run_ranks(1, train, tmp_path, "first", 3, None, backend=None)
    assert result.error is None, result.output
    assert "as the script says" not in result.output
    assert (tmp_path / "of the driver" / "checkpoint-3").exists()
    assert not (tmp_path / "reprieve").exists()


def test_starting_over_moves_nothing_that_ray_names(tmp_path: Path) -> None:
    began(tmp_path, "first", 3, None)
    named = {"checkpoint_results": [{"checkpoint_dir_name": "reprieve/checkpoint-3"}]}
    (tmp_path / CHECKPOINT_MANAGER_SNAPSHOT_FILENAME).write_text(json.dumps(named))
    [result] = run_ranks(1, train, tmp_path, "second", 2, True, backend=None)
    assert "checkpoint-3, which is a result of this run" in result.output
    assert "use another RunConfig(name=…)" in result.output
    assert (tmp_path / "reprieve" / "checkpoint-3").exists()


class Host:
    """Ray's worker: it requests a stop, and notes what it is told of it."""

    def __init__(self) -> None:
        self.grace = Grace(None, "of a test")
        self.told: list[str] = []

    def subscribe(self, listener: StopRequestListener) -> None:
        self.listener = listener

    def unsubscribe(self, listener: StopRequestListener) -> None:
        pass

    def stopped(self, stopped: Preempted) -> None:
        assert stopped.saved and stopped.checkpoint is not None and Path(stopped.checkpoint).exists()
        self.told.append("stopped")

    def hand_back(self) -> None:
        self.told.append("handed back")


def train_and_stop(folder: Path) -> list[str]:
    process_exit.host = host = Host()
    internals.worker_context = lambda: WorkerContext(
        rank=0, world_size=1, local_rank=0, run_name="run", run_id="1", folder=folder
    )
    run = Run(model=torch.nn.Linear(1, 1), exit_wait="1ms")
    try:
        for _ in run.epochs(steps=1000):
            for _ in run.batches(range(1000)):
                run.step()
                if run.steps == 3:
                    host.listener(StopRequest("a drained node", time.monotonic(), None))
                time.sleep(0.001)
    except Preempted:
        end = time.monotonic() + 20
        while "handed back" not in host.told and time.monotonic() < end:
            time.sleep(0.01)
    return host.told


def test_the_worker_knows_what_is_saved_before_it_is_handed_back(tmp_path: Path) -> None:
    [result] = run_ranks(1, train_and_stop, tmp_path, backend=None)
    assert result.error is None, result.output
    assert result.value == ["stopped", "handed back"]


def test_the_environment_requests_it_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    began(tmp_path, "first", 3, None)
    monkeypatch.setenv("CHECKPOINT_RESUME", "false")
    assert began(tmp_path, "second", 2, None) == 0
    assert began(tmp_path, "second", 4, None) == 2
