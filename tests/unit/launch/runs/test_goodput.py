"""The accounting of a run's time: the parts always add up to the wall time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reprieve.checkpoint.folder.attempts import AttemptRecord, losses
from reprieve.launch.runs.goodput import FIRST_START, TimeSpent, time_spent
from reprieve.run_state import RunState

START = 1_700_000_000.0
CAUSES = (RunState.FINISHED, RunState.PREEMPTED, RunState.PAUSED, RunState.FAILED, RunState.HUNG, RunState.LOST)

durations = st.floats(0, 1e5)
moments = st.floats(START, START + 1e6)


@st.composite
def runs_in_order(draw: st.DrawFn) -> tuple[list[AttemptRecord], float]:
    """Attempts in the order of one clock. Any of them may have lost its launcher."""
    now, attempts = START, []
    for _ in range(draw(st.integers(0, 6))):
        attempt = AttemptRecord(now)
        now += draw(durations)
        if draw(st.booleans()):
            attempt.training = now
            now += draw(durations)
            if draw(st.booleans()):
                attempt.kept_until = now
                now += draw(durations)
        now += draw(durations)
        if draw(st.integers(0, 4)):
            attempt.end(now, draw(st.sampled_from(CAUSES)))
        now += draw(durations)
        attempts.append(attempt)
    return attempts, now


@st.composite
def runs_in_any_order(draw: st.DrawFn) -> tuple[list[AttemptRecord], float]:
    """Times by the clocks of several processes, some of which were adjusted during the run."""
    attempts = []
    for _ in range(draw(st.integers(1, 5))):
        attempt = AttemptRecord(draw(moments), training=draw(st.none() | moments), kept_until=draw(st.none() | moments))
        if draw(st.integers(0, 4)):
            attempt.end(draw(moments), draw(st.sampled_from(CAUSES)))
        attempts.append(attempt)
    return attempts, draw(moments)


def assert_adds_up(found: TimeSpent) -> None:
    assert found.trained + sum(found.lost.values()) == pytest.approx(found.wall, abs=1e-6)
    assert min(found.wall, found.trained, *found.lost.values()) >= 0
    assert 0 <= found.goodput <= 1


@given(runs_in_order())
def test_it_adds_up(run: tuple[list[AttemptRecord], float]) -> None:
    attempts, now = run
    assert_adds_up(time_spent(attempts, now))
    assert losses(attempts, CAUSES, now)[1] >= 0


@given(runs_in_any_order())
def test_it_adds_up_when_clocks_are_set(run: tuple[list[AttemptRecord], float]) -> None:
    attempts, now = run
    assert_adds_up(time_spent(attempts, now))
    assert losses(attempts, CAUSES, now)[1] >= 0


def test_no_attempt_yet() -> None:
    assert time_spent([], START) == TimeSpent(0.0, 0.0, {})
    assert time_spent([], START).goodput == 0.0


def test_an_undisturbed_run_lost_its_first_start_alone() -> None:
    attempt = AttemptRecord(START, training=START + 10, kept_until=START + 100)
    attempt.end(START + 100, RunState.FINISHED)
    found = time_spent([attempt], START + 5000)
    assert found == TimeSpent(100.0, 90.0, {FIRST_START: 10.0}), "what comes after the end is no part of the run"
    assert found.goodput == 0.9
    assert found.as_dict() == {"wall": 100.0, "trained": 90.0, "lost": {FIRST_START: 10.0}, "goodput": 0.9}


def test_a_preemption_takes_its_save_the_time_down_and_the_next_start() -> None:
    first = AttemptRecord(START, training=START + 10, kept_until=START + 100)
    first.end(START + 103, RunState.PREEMPTED)
    second = AttemptRecord(START + 200, training=START + 212, kept_until=START + 300)
    second.end(START + 300, RunState.FINISHED)
    found = time_spent([first, second], START + 300)
    assert found == TimeSpent(300.0, 90.0 + 88.0, {FIRST_START: 10.0, RunState.PREEMPTED: 3.0 + 97.0 + 12.0})


def test_a_failure_takes_what_has_to_be_done_again() -> None:
    first = AttemptRecord(START, training=START + 10)
    first.kept_until = START + 60
    first.end(START + 100, RunState.FAILED)
    second = AttemptRecord(START + 101, training=START + 111, kept_until=START + 151)
    second.end(START + 151, RunState.FINISHED)
    found = time_spent([first, second], START + 151)
    assert found == TimeSpent(151.0, 50.0 + 40.0, {FIRST_START: 10.0, RunState.FAILED: 40.0 + 1.0 + 10.0})
    assert losses([first, second], (RunState.FAILED, RunState.HUNG), START + 151) == (1, 90.0 + 40.0)


def test_without_a_checkpoint_a_failure_takes_everything() -> None:
    attempt = AttemptRecord(START, training=START + 10)
    attempt.end(START + 100, RunState.FAILED)
    assert time_spent([attempt], START + 120) == TimeSpent(120.0, 0.0, {FIRST_START: 10.0, RunState.FAILED: 110.0})


def test_an_attempt_that_never_trained_belongs_to_what_came_before_it() -> None:
    first = AttemptRecord(START, training=START + 10, kept_until=START + 50)
    first.end(START + 50, RunState.PREEMPTED)
    second = AttemptRecord(START + 60)
    second.end(START + 65, RunState.FAILED)
    found = time_spent([first, second], START + 70)
    assert found == TimeSpent(70.0, 40.0, {FIRST_START: 10.0, RunState.PREEMPTED: 10.0 + 5.0, RunState.FAILED: 5.0})


def test_a_pause_lasts_until_somebody_looks() -> None:
    attempt = AttemptRecord(START, training=START + 10, kept_until=START + 50)
    attempt.end(START + 51, RunState.PAUSED)
    assert time_spent([attempt], START + 1051).lost == {FIRST_START: 10.0, RunState.PAUSED: 1001.0}
    assert losses([attempt], (RunState.FAILED, RunState.HUNG, RunState.LOST), START + 1051) == (0, 41.0)


def test_while_it_runs_all_counts_as_trained() -> None:
    attempt = AttemptRecord(START, training=START + 10)
    attempt.kept_until = START + 20
    assert time_spent([attempt], START + 100) == TimeSpent(100.0, 90.0, {FIRST_START: 10.0})
    assert losses([attempt], (RunState.RUNNING,), START + 100) == (1, 90.0)


def test_before_the_first_step_nothing_is_trained() -> None:
    assert time_spent([AttemptRecord(START)], START + 7) == TimeSpent(7.0, 0.0, {FIRST_START: 7.0})


def test_a_launcher_that_was_killed_kept_what_was_saved() -> None:
    """The next launcher takes the time of the last record as the end."""
    first = AttemptRecord(START, training=START + 10)
    first.kept_until = START + 80
    first.end(START + 90, RunState.LOST)
    second = AttemptRecord(START + 200, training=START + 210)
    found = time_spent([first, second], START + 300)
    assert found == TimeSpent(300.0, 70.0 + 90.0, {FIRST_START: 10.0, RunState.LOST: 10.0 + 110.0 + 10.0})


def test_times_that_contradict_each_other_are_put_in_order() -> None:
    attempt = AttemptRecord(START, training=START - 5, kept_until=START + 500)
    attempt.end(START + 100, RunState.PREEMPTED)
    assert time_spent([attempt], START + 100) == TimeSpent(100.0, 100.0, {})
