"""A stop signal to all processes of a rank, as torchrun sends it: DataLoader workers survive, and the rank saves."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerCallback

from tests.support.hf_kit import checkpoints, stopped, train_to_end, undisturbed
from tests.support.jobs.hf_jobs import HfJob
from tests.support.jobs.stop_scenario_jobs import told


class SignalsWorkers(TrainerCallback):
    """Signal at a step of an evaluation. `itself`: and then its own process."""

    def __init__(self, nth: int, *, rank: int, itself: bool) -> None:
        self._left = nth
        self._rank = rank
        self._itself = itself

    def on_prediction_step(self, *args: Any, **kwargs: Any) -> None:
        if int(os.environ.get("RANK", "0")) != self._rank:
            return
        self._left -= 1
        if self._left == 0:
            for child in multiprocessing.active_children():
                os.kill(child.pid, signal.SIGTERM)
            if self._itself:
                os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.3)


def _job(folder: Path, **options: Any) -> HfJob:
    return HfJob(str(folder / "job"), workers=2).but(per_device_eval_batch_size=2, **options)


@pytest.mark.parametrize(
    ("ranks", "options"),
    [(1, {}), (1, {"dataloader_persistent_workers": True}), (2, {})],
    ids=["one rank", "persistent workers", "two ranks"],
)
def test_in_an_evaluation(tmp_path: Path, ranks: int, options: dict[str, Any]) -> None:
    job = _job(tmp_path, **options)
    output = stopped(replace(job, callbacks=(SignalsWorkers(2, rank=ranks - 1, itself=True),)), ranks=ranks)
    assert "after SIGTERM" in output, "rank 0 names what stopped the other rank"
    assert train_to_end(job, ranks) == undisturbed(job, ranks)


class Predicts(TrainerCallback):
    """A user's callback that predicts in the middle of the training."""

    def __init__(self) -> None:
        self.trainer: Any = None

    def on_step_end(self, args: Any, state: Any, *more: Any, **kwargs: Any) -> None:
        if state.global_step == 5:
            self.trainer.predict(self.trainer.eval_dataset)


def test_in_a_prediction(tmp_path: Path) -> None:
    """It is no boundary: it ends with all its workers, and then the run stops."""
    job = replace(_job(tmp_path, eval_strategy="no"), callbacks=(Predicts(),))
    stopped(replace(job, callbacks=(*job.callbacks, SignalsWorkers(2, rank=0, itself=True))))
    assert checkpoints(job) == ["checkpoint-5"]
    assert train_to_end(job) == undisturbed(job)


def test_after_an_evaluation_whose_workers_stay(tmp_path: Path) -> None:
    """The second evaluation reuses workers and draws no seed for them, and neither may a resumed one."""
    job = _job(tmp_path, dataloader_persistent_workers=True, eval_strategy="steps", eval_steps=4)
    stopped(job, *told(7))
    # Random numbers that persistent evaluation workers draw are not restored (docs/run.md): these do.
    assert train_to_end(job)["losses-0.jsonl"] == undisturbed(job)["losses-0.jsonl"]


def test_only_the_workers_of_an_evaluation_are_signalled(tmp_path: Path) -> None:
    """The signal was not for the run: it continues."""
    job = _job(tmp_path)
    assert train_to_end(replace(job, callbacks=(SignalsWorkers(2, rank=0, itself=False),))) == undisturbed(job)
