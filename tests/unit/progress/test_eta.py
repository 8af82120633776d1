"""The remaining time: right within 10 % a minute after a resume, and never a wrong number."""

from __future__ import annotations

from typing import Any

import pytest

from reprieve.progress.tracker import Tracker
from reprieve.run_state import RunState
from tests.support.helpers import FakeClock
from tests.support.progress_kit import FakeJob

CONSTANT: dict[str, dict[str, Any]] = {
    "short steps": {"total": 200_000, "step_s": 0.02},
    "long steps": {"total": 2_000, "step_s": 7.0},
    "it compiles first": {"total": 9_000, "step_s": 0.5, "first_s": 45.0},
    "it evaluates": {"total": 9_000, "step_s": 0.5, "evaluation": (40, 5.0)},
    "it evaluates for half of its time": {"total": 9_000, "step_s": 0.5, "evaluation": (20, 10.0)},
    "it evaluates seldom": {"total": 90_000, "step_s": 0.1, "evaluation": (1000, 10.0)},
    "it saves": {"total": 9_000, "step_s": 0.5, "save": (30, 1.5)},
    "it evaluates and saves, and compiles first": {
        "total": 9_000, "step_s": 0.4, "first_s": 20.0, "evaluation": (25, 4.0), "save": (30, 1.5)
    },
    "steps that differ a little": {"total": 9_000, "step_s": 0.5, "jitter": 0.5},
    "every 8th batch is waited for": {"total": 9_000, "step_s": 0.5, "slow": (8, 5.0)},
    "every 8th batch of long steps is waited for": {"total": 900, "step_s": 1.5, "slow": (8, 5.0)},
}  # fmt: skip
RESUMED_FROM = {"from the start": 0, "resumed": 487, "resumed just before an evaluation": 499}


@pytest.mark.parametrize("step", RESUMED_FROM.values(), ids=RESUMED_FROM.keys())
@pytest.mark.parametrize("job", CONSTANT.values(), ids=CONSTANT.keys())
def test_a_minute_after_a_start_it_is_right_within_a_tenth(clock: FakeClock, job: dict[str, Any], step: int) -> None:
    tracker = Tracker(clock=clock, total_steps=job["total"], resumed_from=step or None)
    running = FakeJob(clock, tracker, step=step, **job)
    running.run_for(60.0)
    snapshot = tracker.snapshot().eta_s
    assert snapshot == pytest.approx(running.seconds_to_the_end(), rel=0.1)


@pytest.mark.parametrize("step", [10_001, 10_497, 10_999])
def test_where_somebody_says_how_often_one_evaluation_is_enough(clock: FakeClock, step: int) -> None:
    """500 steps a minute and equally long evaluations every 1000 steps: the first one does not tell the frequency."""
    tracker = Tracker(clock=clock, total_steps=60_000, resumed_from=step)
    running = FakeJob(clock, tracker, total=60_000, step_s=0.12, step=step, evaluation=(1000, 120.0), says_when=True)
    running.run_for(max(60.0, 0.12 * (11_000 - step) + 121.0))
    snapshot = tracker.snapshot().eta_s
    assert snapshot == pytest.approx(running.seconds_to_the_end(), rel=0.1)


def test_an_evaluation_right_after_a_resume_does_not_count_for_every_step(clock: FakeClock) -> None:
    tracker = Tracker(clock=clock, total_steps=20_000, resumed_from=4_999)
    running = FakeJob(clock, tracker, total=20_000, step_s=0.5, step=4_999, evaluation=(500, 30.0))
    running.run_for(33.0)
    snapshot = tracker.snapshot().eta_s
    assert snapshot == pytest.approx(running.seconds_to_the_end(), rel=0.12), "0.56 s a step; not 30.5"


def test_the_speed_of_the_session_before_does_not_count(clock: FakeClock) -> None:
    """Transformers' own callback divides the time of this session by the steps of all sessions."""
    tracker = Tracker(clock=clock, total_steps=10_000, resumed_from=9_000)
    FakeJob(clock, tracker, total=10_000, step_s=1.0, step=9_000).run_for(100.0)
    assert tracker.snapshot().eta_s == pytest.approx(900.0, rel=0.01)


def test_a_stall_is_an_accident(clock: FakeClock) -> None:
    tracker = Tracker(clock=clock, total_steps=10_000)
    running = FakeJob(clock, tracker, total=10_000, step_s=0.5)
    running.run_for(40.0)
    clock.advance(300.0)
    running.run_for(20.0)
    snapshot = tracker.snapshot().eta_s
    assert snapshot == pytest.approx(running.seconds_to_the_end(), rel=0.05)


def test_a_change_of_pace_is_noticed_within_some_minutes(clock: FakeClock) -> None:
    tracker = Tracker(clock=clock, total_steps=100_000)
    running = FakeJob(clock, tracker, total=100_000, step_s=0.2)
    running.run_for(600.0)
    running.step_s = 0.5
    running.run_for(200.0)
    snapshot = tracker.snapshot().eta_s
    assert snapshot == pytest.approx(running.seconds_to_the_end(), rel=0.05)


def test_one_interruption_in_another_is_counted_once(clock: FakeClock) -> None:
    tracker = Tracker(clock=clock, total_steps=1_100)
    for step in range(1, 101):
        clock.advance(1.0)
        tracker.step(step)
        if step % 10 == 0:
            with tracker.pausing(RunState.EVALUATING):
                clock.advance(4.0)
                with tracker.pausing(RunState.SAVING):
                    clock.advance(1.0)
    assert tracker.snapshot().eta_s == pytest.approx(1_500.0)


def test_two_evaluations_at_one_step_are_a_longer_one(clock: FakeClock) -> None:
    """Transformers evaluates several datasets one by one."""
    tracker = Tracker(clock=clock, total_steps=1_100)
    for step in range(1, 101):
        clock.advance(1.0)
        tracker.step(step)
        for _ in range(2 if step % 10 == 0 else 0):
            with tracker.pausing(RunState.EVALUATING):
                clock.advance(2.0)
    assert tracker.snapshot().eta_s == pytest.approx(1_400.0)


def test_an_evaluation_in_the_middle_of_a_step_is_no_part_of_it(clock: FakeClock) -> None:
    tracker = Tracker(clock=clock, total_steps=1_000)
    for step in range(1, 21):
        clock.advance(0.5)
        with tracker.pausing(RunState.EVALUATING):
            clock.advance(9.0)
        clock.advance(0.5)
        tracker.step(step)
    assert tracker.snapshot().eta_s == pytest.approx(980 * 10.0)


def test_steps_may_be_told_in_tens(clock: FakeClock) -> None:
    tracker = Tracker(clock=clock, total_steps=1_000)
    for step in range(10, 110, 10):
        clock.advance(10.0)
        tracker.step(step)
    assert tracker.snapshot().eta_s == pytest.approx(900.0)


# When it is not known


def test_before_the_second_step_nobody_knows(clock: FakeClock) -> None:
    tracker = Tracker(clock=clock, total_steps=100)
    assert tracker.snapshot().eta_s is None
    clock.advance(60.0)
    tracker.step(1)
    assert tracker.snapshot().eta_s is None, "it has compiled; that says nothing"
    clock.advance(2.0)
    tracker.step(2)
    assert tracker.snapshot().eta_s == pytest.approx(196.0)


def test_without_a_total_nobody_knows(clock: FakeClock) -> None:
    tracker = Tracker(clock=clock)
    FakeJob(clock, tracker, total=0, step_s=1.0).run_for(60.0)
    snapshot = tracker.snapshot()
    assert (snapshot.total_steps, snapshot.total_epochs, snapshot.percent, snapshot.eta_s) == (None, None, None, None)


def test_epochs_are_enough(clock: FakeClock) -> None:
    """100 steps per epoch, which is unknown to the tracker."""
    tracker = Tracker(clock=clock, total_epochs=10, resumed_from=450)
    for step in range(451, 511):
        clock.advance(1.0)
        tracker.step(step, epoch=step / 100)
    snapshot = tracker.snapshot()
    assert snapshot.percent == pytest.approx(51.0)
    assert snapshot.eta_s == pytest.approx(490.0)


def test_a_total_may_come_later(clock: FakeClock) -> None:
    tracker = Tracker(clock=clock)
    FakeJob(clock, tracker, total=0, step_s=1.0).run_for(60.0)
    tracker.plan(total_steps=120)
    snapshot = tracker.snapshot()
    assert (snapshot.percent, snapshot.eta_s) == (pytest.approx(50.0), pytest.approx(60.0))


# Never done before it is done


@pytest.mark.parametrize("step", [9_996, 9_999, 10_000, 10_001])
def test_a_run_that_was_stopped_is_not_at_its_end(clock: FakeClock, step: int) -> None:
    tracker = Tracker(clock=clock, total_steps=10_000, resumed_from=9_990)
    for completed in range(9_991, step + 1):
        clock.advance(1.0)
        tracker.step(completed)
    tracker.stopped("SIGTERM", saved=True)
    snapshot = tracker.snapshot()
    assert snapshot.percent is not None
    assert snapshot.percent < 99.95
    assert snapshot.eta_s == pytest.approx(max(1, 10_000 - step))


def test_a_run_that_is_finished_is(clock: FakeClock) -> None:
    tracker = Tracker(clock=clock, total_steps=100)
    tracker.step(40)
    tracker.finished()
    snapshot = tracker.snapshot()
    assert (snapshot.state, snapshot.step, snapshot.percent, snapshot.eta_s) == ("finished", 40, 100.0, 0.0), (
        "it stopped early by itself"
    )
