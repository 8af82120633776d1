"""What a trainer reports in a drill: fingerprints at the stop and after the restart, of each part of its state."""

from __future__ import annotations

import contextlib
import select
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from reprieve.launch.drill import DrillReport, _compare
from reprieve.launch.rank_status import JobStatus
from reprieve.launcher_protocol import DRILL, LAUNCHER_SOCKET, Listener
from reprieve.testing import Fault, pause
from tests.support.hf_kit import attempt
from tests.support.jobs.hf_jobs import HfJob
from tests.support.jobs.stop_scenario_jobs import told

ALWAYS = ["model", "optimizer", "scheduler", "random numbers", "trainer state", "data position"]


@pytest.fixture
def job(tmp_path: Path) -> HfJob:
    return HfJob(str(tmp_path / "job"), samples=48)


def drill(job: HfJob, *faults: Fault, ranks: int = 1, step: int = 4, again: HfJob | None = None) -> DrillReport:
    """Stop the job, restart it and compare. `again`: the job to restart, if it is another."""
    folder = Path(job.folder).parent
    with listening() as (before, env):
        results = attempt(job, *faults, ranks=ranks, **env, **{DRILL: str(folder / "scratch")})
    assert [result.exit_code for result in results] == [143] * ranks, str(results[0])
    assert before.step == step
    with listening() as (after, env):
        results = attempt(again or job, ranks=ranks, **env, **{DRILL: str(folder / "scratch")})
    assert all(result.ok for result in results), str(results[0])
    report = DrillReport(30.0, "a test")
    _compare(report, before, after)
    assert report.equal is not None, report.problems
    return report


@contextlib.contextmanager
def listening() -> Iterator[tuple[JobStatus, dict[str, str]]]:
    """A listener for the ranks' reports, and the environment that directs them there."""
    seen, listener, done = JobStatus(), Listener(), threading.Event()

    def listen() -> None:
        while not done.is_set():
            select.select([listener.socket], [], [], 0.05)
            for report in listener.read():
                seen.update(report)

    thread = threading.Thread(target=listen)
    thread.start()
    try:
        yield seen, {LAUNCHER_SOCKET: str(listener.path)}
    finally:
        done.set()
        thread.join()
        listener.close()


@pytest.mark.parametrize(
    ("more", "ranks"),
    [
        ({}, 1),
        ({"trainer": "packed", "model": "llama"}, 1),
        ({"trainer": "lora", "model": "llama"}, 2),
        ({"trainer": "grpo", "model": "llama"}, 1),
        ({"stream": True}, 2),
        ({"workers": 2}, 1),
        ({"scaling": True}, 1),
        ({"sharded": "SHARDED_STATE_DICT"}, 2),
        ({"zero": 2}, 2),
        ({"zero": 3}, 2),
    ],
    ids=lambda value: ", ".join(value) or "plain" if isinstance(value, dict) else f"{value} ranks",
)
def test_a_resumed_trainer_is_equal_in_every_part(job: HfJob, more: dict[str, Any], ranks: int) -> None:
    job = replace(job, **more).but(num_train_epochs=1, eval_strategy="no")
    report = drill(job, *told(4, rank=ranks - 1), ranks=ranks)
    assert report.equal is True, report.problems
    expected = {*ALWAYS, "data order"} | ({"scaler"} if job.scaling else set())
    assert set(report.compared) == expected


def test_a_stop_in_an_evaluation(job: HfJob) -> None:
    """The next batch of the training follows an evaluation that draws random numbers: it is not compared."""
    report = drill(job.but(eval_strategy="steps", eval_steps=3), *told(1, "prediction"), step=3)
    assert report.equal is True, report.problems
    assert set(report.compared) == set(ALWAYS)


def test_a_state_that_takes_longer_to_compare_than_a_process_may_take_to_leave(job: HfJob) -> None:
    job = replace(job, options=(("exit_wait", "0.2s"),)).but(num_train_epochs=1, eval_strategy="no")
    # Four steps of four samples, and a batch ahead: the next fetch is the drill's.
    report = drill(job, *told(4), pause(0, "fetch", 1.0, nth=21))
    assert report.equal is True, report.problems


def test_a_script_that_looks_for_its_newest_checkpoint_itself(job: HfJob) -> None:
    """The script names its own folder; in a drill the run is elsewhere."""
    job = job.but(num_train_epochs=1, eval_strategy="no")
    report = drill(job, *told(4), again=replace(job, given=str(job.output / "checkpoint-4")))
    assert report.equal is True, report.problems


class Tampering(transformers.TrainerCallback):
    """A user's callback that changes something after a checkpoint was loaded."""

    def __init__(self, what: str) -> None:
        self.trainer: Any = None
        self._what = what

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step:
            with torch.no_grad():
                getattr(self, f"_{self._what}")()

    def _model(self) -> None:
        next(self.trainer.model.parameters())[0] += 1e-4

    def _optimizer(self) -> None:
        next(iter(self.trainer.optimizer.state.values()))["exp_avg"][0] += 1e-4

    def _scheduler(self) -> None:
        self.trainer.lr_scheduler.last_epoch += 1

    def _data(self) -> None:
        data = self.trainer.train_dataset
        data._data = data._data.flip(0)


@pytest.mark.parametrize(
    ("what", "named"),
    [("model", "model"), ("optimizer", "optimizer"), ("scheduler", "scheduler"), ("data", "data order")],
)
def test_what_is_not_equal_is_named(job: HfJob, what: str, named: str) -> None:
    job = replace(job, callbacks=(Tampering(what),)).but(num_train_epochs=1, eval_strategy="no")
    report = drill(job, *told(4))
    assert report.equal is False
    assert report.differences == {named: [0]}
    assert report.problems == [f"the state after the restart is not the one that was saved: {named} (rank 0)"]
