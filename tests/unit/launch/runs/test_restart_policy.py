"""Whether and when a run that failed is restarted."""

from __future__ import annotations

import random

import pytest

from reprieve.checkpoint.folder.attempts import AttemptRecord
from reprieve.launch.runs.restart_policy import GiveUp, RestartPolicy, Retry, find_endless_restarts
from reprieve.run_state import RunState

JITTER = 0.25
LONGEST_S = 60.0


def failures(steps: list[int | None], allowed: int = 1000) -> list[Retry | GiveUp]:
    restarts = RestartPolicy(allowed, random.Random(1))
    return [restarts.after_failure(step) for step in steps]


def waits(found: list[Retry | GiveUp]) -> list[float]:
    assert all(isinstance(decision, Retry) for decision in found), found
    return [decision.wait_s for decision in found if isinstance(decision, Retry)]


def test_the_wait_doubles_up_to_a_minute() -> None:
    expected = [1, 2, 4, 8, 16, 32, 60, 60, 60]
    for wait, middle in zip(waits(failures([None] * len(expected))), expected, strict=True):
        assert middle * (1 - JITTER) <= wait <= middle * (1 + JITTER)


def test_the_wait_stays_a_minute_however_often_it_fails() -> None:
    assert waits(failures([None] * 3000, allowed=3000))[-1] <= LONGEST_S * (1 + JITTER)


def test_jitter_spreads_over_a_quarter_both_ways() -> None:
    first = [waits([RestartPolicy(1, random.Random(seed)).after_failure(5)])[0] for seed in range(300)]
    assert 1 - JITTER <= min(first) < 1 - 0.8 * JITTER
    assert 1 + 0.8 * JITTER < max(first) <= 1 + JITTER


def test_without_a_seed_two_runs_do_not_wait_alike() -> None:
    assert len({waits([RestartPolicy(1).after_failure(5)])[0] for _ in range(10)}) > 1


@pytest.mark.parametrize("steps", [[5, 5, 5], [5, 4, 0], [0, 0, 0], [5, None, 5]])
def test_three_attempts_without_progress_are_enough(steps: list[int | None]) -> None:
    first, second, third = failures(steps)
    assert isinstance(first, Retry)
    assert isinstance(second, Retry)
    assert isinstance(third, GiveUp)
    assert third.reason.startswith(f"no progress: 3 attempts in a row ended at step {steps[0]} or before")


def test_progress_begins_the_count_again() -> None:
    found = failures([5, 5, 6, 6, 7, 7, 7])
    assert [type(decision) for decision in found] == [Retry] * 6 + [GiveUp]


def test_progress_begins_the_waits_again() -> None:
    found = waits(failures([5, 5, 6, 6, 7]))
    for wait, middle in zip(found, [1, 2, 1, 2, 1], strict=True):
        assert middle * (1 - JITTER) <= wait <= middle * (1 + JITTER)


def test_progress_is_measured_against_the_furthest_step() -> None:
    assert isinstance(failures([10, 8, 9])[-1], GiveUp), "9 is further than 8, but the run has been at 10"


def test_as_often_as_is_allowed() -> None:
    restarts = RestartPolicy(2, random.Random(1))
    assert isinstance(restarts.after_failure(1), Retry)
    assert isinstance(restarts.after_failure(2), Retry)
    assert restarts.used == 2
    assert restarts.after_failure(3) == GiveUp("failed 3 times, 2 restarts allowed")
    assert restarts.used == 2


def test_where_none_is_allowed_there_is_nothing_to_explain() -> None:
    restarts = RestartPolicy(0)
    assert [restarts.after_failure(5) for _ in range(4)] == [GiveUp("")] * 4
    assert restarts.used == 0


def test_attempts_that_did_not_say_how_far_they_got_are_not_stuck() -> None:
    found = failures([None] * 10, allowed=9)
    assert isinstance(found[8], Retry)
    assert found[9] == GiveUp("failed 10 times, 9 restarts allowed")


def test_no_step_is_not_progress() -> None:
    for wait, middle in zip(waits(failures([5, None, None])), [1, 2, 4], strict=True):
        assert middle * (1 - JITTER) <= wait <= middle * (1 + JITTER)


# Restarts by a cluster


def ended(cause: RunState, saved_step: int | None = None, run: str = "uid") -> AttemptRecord:
    return AttemptRecord(0.0, ended=1.0, cause=cause, saved_step=saved_step, run=run)


def test_a_cluster_that_restarts_without_progress_is_stopped_after_five_failures() -> None:
    attempts = [ended(RunState.FAILED, 10)] * 4
    assert find_endless_restarts(attempts, "uid") is None
    reason = find_endless_restarts([*attempts, ended(RunState.HUNG, 10)], "uid")
    assert reason is not None
    assert "5 starts of run 'uid' in a row failed, and none saved a step after 10" in reason


def test_failures_before_the_first_checkpoint_count() -> None:
    assert find_endless_restarts([ended(RunState.FAILED)] * 5, "uid") is not None


@pytest.mark.parametrize("cause", [RunState.PREEMPTED, RunState.LOST, RunState.PAUSED])
def test_preemptions_never_count(cause: RunState) -> None:
    """Also not those without notice, which look like a killed launcher."""
    assert find_endless_restarts([ended(cause, 10)] * 50, "uid") is None


def test_a_step_that_was_saved_is_progress() -> None:
    attempts = [ended(RunState.FAILED, step) for step in range(1, 30)]
    assert find_endless_restarts(attempts, "uid") is None
    assert find_endless_restarts([*attempts, *[ended(RunState.FAILED, 29)] * 3], "uid") is None
    assert find_endless_restarts([*attempts, *[ended(RunState.FAILED, 29)] * 4], "uid") is not None


def test_a_new_job_on_the_same_folder_is_not_blamed_for_an_old_one() -> None:
    assert find_endless_restarts([ended(RunState.FAILED, run="old")] * 9, "uid") is None
