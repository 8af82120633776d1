"""Loops of every shape are stopped and go on: finished ones, limited ones, several passes, other numbers of ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from reprieve.testing import run_ranks, terminate
from tests.support.jobs import stop_scenario_jobs as jobs
from tests.support.jobs.loop_jobs import Job, train
from tests.support.jobs.stop_scenario_jobs import attempt, checkpoints, seen, steps_seen, told, undisturbed


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(str(tmp_path / "job"), epochs=2)


def _stop_at(job: Job, nth: int, fn: Callable[..., None], args: tuple[Any, ...] = (), *, step: int) -> None:
    result = attempt(job, *told(nth), fn=fn, args=args)
    assert result.exit_code == 143, str(result)
    assert f"saved step {step}" in result.output
    assert checkpoints(job)[0] == step


def _goes_on(job: Job, fn: Callable[..., None], args: tuple[Any, ...] = ()) -> None:
    result = attempt(job, fn=fn, args=args)
    assert result.ok, str(result)
    assert seen(job.folder) == undisturbed(job, fn=fn, args=args)


# The end


def test_a_finished_job_trains_no_more_until_more_is_asked_for(job: Job) -> None:
    _stop_at(job, 13, train, step=13)
    _goes_on(job, train)
    lines, found = steps_seen(job), checkpoints(job)
    again = attempt(job)
    assert again.ok, str(again)
    assert "already finished after 20 steps" in again.output
    assert (steps_seen(job), checkpoints(job)) == (lines, found)
    more = replace(job, epochs=3)
    result = attempt(more)
    assert result.ok, str(result)
    assert "and continues: more is requested now" in result.output
    assert seen(job.folder) == undisturbed(more)


def test_a_job_that_ends_early_is_finished(job: Job) -> None:
    _stop_at(job, 5, jobs.stops_early, (14,), step=5)
    _goes_on(job, jobs.stops_early, (14,))
    lines = steps_seen(job)
    again = attempt(job, fn=jobs.stops_early, args=(14,))
    assert again.ok, str(again)
    assert "already finished after 14 steps" in again.output
    assert steps_seen(job) == lines


def test_no_step_since_the_last_checkpoint(job: Job) -> None:
    _stop_at(job, 4, train, step=4)
    stopped = attempt(job, *told(1, "after apply"))
    assert stopped.exit_code == 143, str(stopped)
    assert "step 4 is saved already" in stopped.output
    assert "saved step" not in stopped.output
    assert checkpoints(job) == [4]
    _goes_on(job, train)


# Shapes


def test_only_steps(job: Job) -> None:
    _stop_at(job, 4, jobs.only_steps, (12,), step=4)
    _stop_at(job, 3, jobs.only_steps, (12,), step=7)
    _goes_on(job, jobs.only_steps, (12,))


def test_a_number_of_steps_that_ends_in_an_epoch(job: Job) -> None:
    _stop_at(job, 3, jobs.limited, (7,), step=3)
    _goes_on(job, jobs.limited, (7,))
    _goes_on(job, jobs.limited, (13,))


@pytest.mark.parametrize("nth", [3, 6, 11, 16, 27])
def test_two_passes_in_an_epoch(job: Job, nth: int) -> None:
    """The first has 6 batches, the second 10."""
    _stop_at(job, nth, jobs.two_passes, step=nth)
    _goes_on(job, jobs.two_passes)


@pytest.mark.parametrize("nth", [3, 6, 9])
def test_two_loaders_side_by_side(job: Job, nth: int) -> None:
    _stop_at(job, nth, jobs.zipped, step=nth)
    _goes_on(job, jobs.zipped)


# Others


@pytest.mark.parametrize("ranks", [(2, 1), (1, 2)])
def test_another_number_of_ranks(job: Job, ranks: tuple[int, int]) -> None:
    """48 samples; after the stop those of the epoch that nobody has seen are dealt out, and no other."""
    before, after = ranks
    results = run_ranks(before, jobs.dealt, job, faults=told(4))
    assert [result.exit_code for result in results] == [143] * before, str(results[0])
    results = run_ranks(after, jobs.dealt, job)
    assert all(result.ok for result in results), str(results[0])
    assert f"written by {before} ranks, and this run has {after}" in results[0].output
    assert "no longer bit for bit" in results[0].output
    lines = [line for rank in seen(job.folder, 2) for line in rank[:-1]]
    for epoch in range(2):
        samples = [one for line in lines if line["epoch"] == epoch for one in line["samples"]]
        assert sorted(samples) == list(range(48))


def test_a_stop_that_cannot_wait_for_the_end_of_the_step(job: Job) -> None:
    """A step is 5 batches of 0.4 s, and the process has less than what is left of it."""
    slow = replace(job, accumulate=5, step_s=0.4, grace=1.6)
    result = attempt(slow, terminate(0, "forward", nth=11))
    assert result.exit_code == 143, str(result)
    assert "no time to finish the running step: back to step 2" in result.output
    assert checkpoints(job) == [2]
    _goes_on(replace(slow, step_s=0.0), train)


def test_a_step_that_reaches_over_the_end_of_an_epoch_cannot_be_given_up(job: Job) -> None:
    """Of the 10 batches of an epoch 2 are left over after two steps of 4: their gradients are part of the next step."""
    slow = replace(job, accumulate=4, step_s=0.3, grace=1.1)
    result = attempt(slow, terminate(0, "forward", nth=12))
    assert result.exit_code == 143, str(result)
    assert "back to step" not in result.output
    assert "the grace period is over" in result.output
    assert checkpoints(job) == []
    _goes_on(replace(slow, step_s=0.0, grace=None), train)
