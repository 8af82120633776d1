"""All ranks stop after the same step: real processes and collectives, requests at random times, ranks that die."""

from __future__ import annotations

import os
import signal
from statistics import median, quantiles

import pytest
from benchmarks.common_step import steady_cost

from reprieve.testing import kill, pause, run_ranks, terminate, values
from tests.support.jobs import stop_jobs
from tests.support.jobs.stop_jobs import Stops

SOAK = os.environ.get("REPRIEVE_SOAK") == "1"
STOPS = {2: 170, 3: 170, 4: 160}  # 500
if SOAK:
    STOPS = {size: count * 20 for size, count in STOPS.items()}


def _one_common_step(ranks: list[Stops]) -> None:
    for number, stop in enumerate(zip(*(rank.stops for rank in ranks), strict=True)):
        assert len({(seen.kinds, seen.step) for seen in stop}) == 1, f"stop {number}: {stop}"


def _reactions_s(ranks: list[Stops]) -> list[float]:
    """The time from the first request until the last rank is at the step."""
    stops = zip(*(rank.stops for rank in ranks), strict=True)
    return [max(seen.stood for seen in stop) - min(seen.asked for seen in stop) for stop in stops]


@pytest.mark.soak
@pytest.mark.parametrize("world_size", STOPS)
def test_all_ranks_stop_after_one_step(world_size: int, capsys: pytest.CaptureFixture[str]) -> None:
    ranks = values(
        run_ranks(world_size, stop_jobs.many_stops, STOPS[world_size], world_size, timeout="4h" if SOAK else "200s")
    )
    _one_common_step(ranks)
    assert {stop.kinds[-1] for rank in ranks for stop in rank.stops} == {"stop"}
    reactions, steps = _reactions_s(ranks), [seconds for rank in ranks for seconds in rank.step_s]
    with capsys.disabled():
        print(
            f"\n{world_size} ranks, {len(reactions)} stops: {median(reactions) * 1000:.1f} ms in the median, "
            f"{quantiles(reactions, n=100)[-1] * 1000:.0f} at p99, with steps of {median(steps) * 1000:.1f} ms"
        )
    assert median(reactions) <= median(steps) + 0.010


def test_through_a_folder() -> None:
    ranks = values(run_ranks(3, stop_jobs.many_stops, 20, 7, store="folder"))
    _one_common_step(ranks)


def test_a_stop_around_the_last_step_stops_all_or_none() -> None:
    """Jobs of three steps, with a request at any time in the last step, or later."""
    ranks = values(run_ranks(3, stop_jobs.many_stops, 120, 8, 3))
    _one_common_step(ranks)
    ends = {stop.kinds[-1] for stop in ranks[0].stops}
    assert ends == {"stop", "finished"}


def test_a_real_signal_to_one_rank() -> None:
    results = run_ranks(3, stop_jobs.stop_by_signal, faults=[terminate(rank=1, at="step 20")])
    (kind, step), *others = values(results)
    assert kind == "stop"
    assert 20 <= step < 200
    assert others == [(kind, step)] * 2


# Ranks and hosts that die


@pytest.mark.parametrize("requester", [0, 1])
def test_a_rank_is_killed_before_it_publishes(requester: int) -> None:
    """The others get the same failure, within the limit of a stop."""
    dies = kill(rank=1, at="common step: set 0/started/1")
    results = run_ranks(3, stop_jobs.train_and_tell, requester, faults=[dies], backend=None)
    assert results[1].signal == signal.SIGKILL
    for result in (results[0], results[2]):
        assert result.ok, str(result)
        message, _, seconds = result.value
        assert message == "RankFailed: stopping together: rank 1: did not answer: it is dead, or hangs"
        assert seconds < 15


def test_a_rank_that_stands_still_hears_the_same_when_it_goes_on() -> None:
    stands = pause(rank=2, at="common step: set 0/started/2", seconds="3s")
    results = values(run_ranks(3, stop_jobs.train_and_tell, 0, 1.0, faults=[stands], backend=None))
    assert {message for message, _, _ in results} == {
        "RankFailed: stopping together: rank 2: did not answer: it is dead, or hangs"
    }


def test_a_rank_is_killed_after_it_has_published() -> None:
    """There is a common step. The others reach it, because their steps contain no collectives here."""
    results = run_ranks(
        2, stop_jobs.train_and_tell, 0, faults=[kill(rank=1, at="common step: put 0/end")], backend=None
    )
    assert results[0].ok, str(results[0])
    assert results[0].value[0] == "stop"


def test_a_rank_that_was_killed_long_before_anybody_asks() -> None:
    results = run_ranks(3, stop_jobs.train_and_tell, 0, faults=[kill(rank=2, at="step 2")], backend=None)
    assert [result.value[0].startswith("RankFailed: stopping together: rank 2") for result in results[:2]] == [True] * 2


def test_the_host_of_the_store_dies() -> None:
    """Training continues; a later request fails with the loss of the store."""
    results = run_ranks(
        3, stop_jobs.outlive_the_store, 1000, faults=[kill(rank=0, at="all are there")], store_host=0, backend=None
    )
    assert results[0].signal == signal.SIGKILL
    assert values(results[1:]) == [(1000, "StoreLost")] * 2
    assert all(result.output.count("The ranks can no longer stop or save together") == 1 for result in results[1:])


def test_a_process_that_never_closes_ends() -> None:
    results = run_ranks(2, stop_jobs.die_without_close, backend=None)
    assert values(results) == ["ended"] * 2
    assert max(result.seconds for result in results) < 20


# No cost without a request


def test_a_boundary_costs_microseconds_and_sends_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    cost = steady_cost(world_size=4)
    with capsys.disabled():
        print(f"\n{cost}")
    assert cost.boundary_us <= 5
    assert cost.collectives == 0
    assert cost.messages == 0
