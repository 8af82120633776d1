"""The automatic save interval loses the least time."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest

from reprieve import Checkpointer
from reprieve.checkpoint.auto_interval import FIRST, AutoInterval, best_interval
from reprieve.checkpoint.folder import attempts
from reprieve.checkpoint.folder.attempts import AttemptRecord
from reprieve.checkpoint.schedule import Schedule
from reprieve.run_state import RunState
from reprieve.storage.disk import Disk
from tests.support.helpers import FakeClock, small_model

DAY_S = 86400.0


@pytest.mark.parametrize("part", np.geomspace(1e-4, 0.3, 12))
@pytest.mark.parametrize("between_s", [600.0, 36_000.0])
def test_the_interval_loses_as_little_as_the_best_of_all(part: float, between_s: float) -> None:
    """Interruptions come at random (exponentially), and a start takes no time: then what a second of work takes is
    known exactly."""
    cost_s = part * between_s

    def lost(interval_s: np.ndarray | float) -> np.ndarray:
        return between_s * np.expm1((interval_s + cost_s) / between_s) / interval_s - 1

    least = lost(np.geomspace(1e-3 * between_s, 10 * between_s, 200_000)).min()
    assert lost(best_interval(cost_s, between_s)) <= 1.01 * least


def test_a_save_that_takes_longer_than_what_is_between_two_interruptions() -> None:
    assert best_interval(100.0, 50.0) == 50.0
    assert best_interval(1000.0, 50.0) == 50.0
    assert best_interval(99.9, 50.0) > 0


# As a schedule


def interval_after(
    cost_s: float, clock: FakeClock, *, trained_s: float = 60.0, attempts: Sequence[AttemptRecord] = ()
) -> float:
    schedule = Schedule.of("auto", clock)
    assert schedule.auto is not None
    schedule.auto.learn(attempts, clock.time())
    clock.advance(trained_s)
    schedule.saved(1, timedelta(seconds=cost_s))
    assert schedule.interval is not None
    return schedule.interval.total_seconds()


def test_the_first_save_comes_after_a_minute(clock: FakeClock) -> None:
    schedule = Schedule.of("auto", clock)
    assert timedelta(minutes=1) == FIRST
    clock.advance(59.9)
    assert not schedule.due(1)
    clock.advance(0.1)
    assert schedule.due(2)


def test_until_a_save_has_told_its_cost_it_stays_a_minute(clock: FakeClock) -> None:
    schedule = Schedule.of("auto", clock)
    schedule.saved(1)
    assert schedule.interval == FIRST


def test_then_it_follows_what_a_save_costs(clock: FakeClock) -> None:
    schedule = Schedule.of("auto", clock)
    clock.advance(60)
    schedule.saved(1, timedelta(seconds=2))
    expected = best_interval(2, DAY_S + 60)
    assert schedule.interval == timedelta(seconds=expected)
    clock.advance(expected - 0.01)
    assert not schedule.due(2)
    clock.advance(0.02)
    assert schedule.due(3)
    clock.advance(4)
    schedule.saved(3, timedelta(seconds=4))
    trained_s = 60 + expected + 0.01 + 4
    assert schedule.interval.total_seconds() == pytest.approx(best_interval(3, DAY_S + trained_s), abs=1e-3)


def test_a_dearer_save_is_made_less_often(clock: FakeClock) -> None:
    found = [interval_after(cost_s, clock) for cost_s in (0.1, 1.0, 10.0, 30.0)]
    assert found == sorted(found)
    assert found[0] < found[-1] / 10


def test_it_follows_the_interruptions_of_earlier_attempts(clock: FakeClock) -> None:
    killed = [AttemptRecord(0.0, training=0.0, ended=7200 / 23, cause=RunState.LOST)] * 23
    found = interval_after(2.0, clock, attempts=killed)
    assert found == pytest.approx(best_interval(2.0, (DAY_S + 7200 + 60) / 24), abs=1e-6)
    preempted = [AttemptRecord(0.0, training=0.0, ended=864_000.0, cause=RunState.PREEMPTED)]
    found = interval_after(2.0, clock, attempts=preempted)
    assert found == pytest.approx(best_interval(2.0, DAY_S + 864_000 + 60), abs=1e-6)


def test_a_checkpointer_reads_the_attempts_in_its_folder(tmp_path: Path) -> None:
    (tmp_path / ".reprieve").mkdir()
    crashed = AttemptRecord(0.0, training=10.0, ended=110.0, cause=RunState.FAILED)
    attempts.write(Disk(), tmp_path, [crashed, crashed])
    with Checkpointer(tmp_path, every="auto", model=small_model()) as checkpointer:
        assert checkpointer.schedule.auto == AutoInterval(2, 200.0)


def test_between_a_second_and_an_hour(clock: FakeClock) -> None:
    assert interval_after(0.0, clock) == 1.0
    assert interval_after(3000.0, clock) == 3600.0


# A run with many interruptions, as arithmetic


def lost_with_auto(times: np.ndarray, cost_s: float) -> float:
    """Each start knows how often the run was interrupted before, but not what a save costs."""
    trained = kept = 0.0
    for count, until in enumerate(times.tolist()):
        auto, at = AutoInterval(count, trained), 0.0
        while at + (work := auto.interval(at).total_seconds()) + cost_s <= until:
            at += work + cost_s
            kept += work
            auto.saved(cost_s)
        trained += until
    return trained - kept


def least_lost_with_a_fixed_interval(times: np.ndarray, cost_s: float) -> float:
    best = best_interval(cost_s, float(times.mean()))
    tried = np.geomspace(best / 5, best * 5, 150)
    return min(float(times.sum() - interval * np.floor(times / (interval + cost_s)).sum()) for interval in tried)


@pytest.mark.parametrize("cost_s", [0.5, 5.0, 30.0])
@pytest.mark.parametrize("between_s", [600.0, 3600.0, 36_000.0])
def test_auto_loses_hardly_more_than_the_best_fixed_interval(between_s: float, cost_s: float) -> None:
    times = np.random.default_rng(7).exponential(between_s, size=1500)
    assert lost_with_auto(times, cost_s) <= 1.15 * least_lost_with_a_fixed_interval(times, cost_s)
