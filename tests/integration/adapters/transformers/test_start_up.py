"""A stop before the first step of a process ends it at once: there is nothing to save."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from reprieve.testing import pause, terminate
from tests.support.hf_kit import attempt, checkpoints, stopped, train_to_end, undisturbed
from tests.support.jobs.hf_jobs import HfJob
from tests.support.jobs.stop_scenario_jobs import told

FAR_S = 60
"""How long it would take to reach a boundary. The tests end before that."""


@pytest.fixture
def job(tmp_path: Path) -> HfJob:
    return HfJob(str(tmp_path / "job"), options=(("exit_wait", 1),)).but(save_strategy="steps", save_steps=4)


def _ends_there(job: HfJob, at: str, nth: int = 1, *, ranks: int = 1) -> None:
    before, began = checkpoints(job), time.monotonic()
    waiting = [pause(rank, at, FAR_S, nth=nth) for rank in range(ranks)]
    for result in attempt(job, terminate(0, at, nth=nth), *waiting, ranks=ranks):
        assert result.exit_code == 143, str(result)
        assert "no step was done since the start" in result.output
    assert time.monotonic() - began < FAR_S
    assert checkpoints(job) == before


@pytest.mark.parametrize("at", ["fetch", "forward"])
def test_in_a_first_start(job: HfJob, at: str) -> None:
    _ends_there(job, at)
    assert train_to_end(job) == undisturbed(job)


@pytest.mark.parametrize("at", ["load", "fetch", "forward"])
def test_in_a_resumed_one(job: HfJob, at: str) -> None:
    """Loading, the first batch and compiling all come before the end of the first step."""
    stopped(job, *told(6))
    _ends_there(job, at)
    assert checkpoints(job) == ["checkpoint-4", "checkpoint-6"]
    assert train_to_end(job) == undisturbed(job)


def test_while_batches_are_read_again(job: HfJob) -> None:
    """The stream has no position and is replayed from its beginning: the 5th sample of 24."""
    job = replace(job, stream=True, masking=False)
    stopped(job, *told(6))
    _ends_there(job, "fetch", 5)
    assert train_to_end(job) == undisturbed(job)


@pytest.mark.parametrize("at", ["load", "forward"])
def test_all_ranks_where_one_is_told(job: HfJob, at: str) -> None:
    for result in attempt(job, *told(6), ranks=2):
        assert result.exit_code == 143, str(result)
    _ends_there(job, at, ranks=2)
    assert train_to_end(job, ranks=2) == undisturbed(job, ranks=2)


def test_a_first_step_that_is_done_in_time_is_saved(job: HfJob) -> None:
    stopped(replace(job, options=(("exit_wait", 20),)), terminate(0, "forward"), pause(0, "forward", 2))
    assert checkpoints(job) == ["checkpoint-1"]
    assert train_to_end(job) == undisturbed(job)
