"""When a periodic save is due."""

from __future__ import annotations

from datetime import timedelta

import pytest

from reprieve.checkpoint.schedule import Every, Schedule
from reprieve.errors import ConfigError
from tests.support.helpers import FakeClock


@pytest.mark.parametrize("every", [5, "5", "5 steps", "5steps", [5]])
def test_every_so_many_steps(every: Every) -> None:
    schedule = Schedule.of(every)
    assert [step for step in range(16) if schedule.due(step)] == [5, 10, 15]


def test_every_epoch() -> None:
    schedule = Schedule.of("epoch")
    assert schedule.due(7, epoch_ended=True)
    assert not schedule.due(8)


@pytest.mark.parametrize("every", ["5m", timedelta(minutes=5), ["300s"]])
def test_every_so_often_counted_from_the_last_save(every: Every, clock: FakeClock) -> None:
    schedule = Schedule.of(every, clock)
    clock.advance(299)
    assert not schedule.due(1)
    clock.advance(1)
    assert schedule.due(2)
    schedule.saved(2)
    assert not schedule.due(3)
    clock.advance(300)
    assert schedule.due(4)


def test_any_of_several(clock: FakeClock) -> None:
    schedule = Schedule.of([10, "epoch", "1m"], clock)
    assert schedule.due(10)
    assert schedule.due(3, epoch_ended=True)
    assert not schedule.due(3)
    clock.advance(60)
    assert schedule.due(3)


def test_a_save_for_another_reason_counts(clock: FakeClock) -> None:
    schedule = Schedule.of([10, "1m"], clock)
    clock.advance(59)
    schedule.saved(10)
    clock.advance(59)
    assert not schedule.due(10), "the step is saved"
    assert not schedule.due(11)


@pytest.mark.parametrize("every", [None, "never", []])
def test_never(every: Every, clock: FakeClock) -> None:
    schedule = Schedule.of(every, clock)
    clock.advance(10**9)
    assert not any(schedule.due(step, epoch_ended=True) for step in range(100))


@pytest.mark.parametrize(
    "every", [["5m", "10m"], [100, 250], [100, "250 steps"], ["auto", "5m"], [timedelta(1), "auto"], ["auto", "auto"]]
)
def test_one_of_each_kind(every: Every) -> None:
    with pytest.raises(ConfigError, match=r"every=\[.*one number of steps and one duration"):
        Schedule.of(every)


@pytest.mark.parametrize("every", [0, -5, "0 steps", True, "often", "5 parsecs", "-5m", ["epoch", "x"]])
def test_what_is_not_understood_is_refused_by_name(every: Every) -> None:
    with pytest.raises(ConfigError, match="every="):
        Schedule.of(every)
