"""Accelerate's dispatcher on several ranks: rank 0 reads for all, a round ahead, and fills up the last batch with
samples of the first. After a stop anywhere, each rank sees the batches and random numbers of an undisturbed run."""

from __future__ import annotations

from typing import Any

import pytest

from reprieve.testing import run_ranks, values
from tests.support.jobs import dispatcher_jobs as jobs
from tests.support.jobs.dispatcher_jobs import LOADERS, StopPoint
from tests.support.jobs.hf_jobs import PRELOAD


def _on_ranks(ranks: int, job: Any, *args: Any) -> list[Any]:
    return values(run_ranks(ranks, job, *args, modules=PRELOAD))


@pytest.mark.parametrize(
    ("ranks", "scenarios"),
    [
        (2, [[(0, 1), (0, 2), (0, -2), (0, -1)], [(1, 0), (1, 1), (1, -2), (1, -1)]]),
        (3, [[(0, 1), (0, -2), (0, -1), (1, 2), (1, -1)]]),
    ],
)
def test_stopped_anywhere(ranks: int, scenarios: list[list[StopPoint]]) -> None:
    found = _on_ranks(ranks, jobs.differing, list(LOADERS), [False, True], scenarios, {})
    assert found == [[]] * ranks


@pytest.mark.parametrize(("ranks", "stops"), [(2, [(0, 1), (0, -2), (0, -1), (1, 2)]), (3, [(0, 2), (1, -2)])])
def test_with_workers(ranks: int, stops: list[StopPoint]) -> None:
    names = ["map", "stream", "stream, drop_last"]
    found = _on_ranks(ranks, jobs.differing, names, [False, True], [stops], {"num_workers": 2})
    assert found == [[]] * ranks


def test_streams_of_datasets_with_workers() -> None:
    found = _on_ranks(2, jobs.differing, ["stream of datasets"], [False], [[(0, 2), (1, -2)]], {"num_workers": 2})
    assert found == [[]] * 2


@pytest.mark.parametrize(("workers", "stops"), [(0, [(0, 1), (0, 3), (0, -1), (1, 2)]), (2, [(0, 3)])])
def test_each_rank_reads_its_own_part_of_a_stream(workers: int, stops: list[StopPoint]) -> None:
    """Here no rank reads for the others: `split_dataset_by_node` divides a stream of `datasets`."""
    found = _on_ranks(2, jobs.differing_in_own_parts, [stops], {"num_workers": workers})
    assert found == [[]] * 2


def test_with_persistent_workers() -> None:
    """Batches that are read and dropped at the end of an epoch do not affect the next epoch."""
    names = ["map", "map, drop_last", "stream"]
    more = {"num_workers": 2, "persistent_workers": True}
    found = _on_ranks(2, jobs.differing, names, [False], [[(0, 2), (0, -1), (1, 2)]], more)
    assert found == [[]] * 2


def test_ranks_that_get_the_same_batch() -> None:
    assert _on_ranks(2, jobs.differing_in_a_mesh, [[(0, 1), (0, -2), (0, -1), (1, 2)]]) == [[]] * 2


def test_in_new_processes() -> None:
    saved, seen = None, None
    for stop in [(0, 2), (0, 5), (1, 1), None]:
        results = _on_ranks(2, jobs.one_start, "map", saved, stop, seen)
        saved, seen = [result[0] for result in results], [result[1] for result in results]
    assert jobs.same(seen, _on_ranks(2, jobs.stock, "map"))


@pytest.mark.parametrize("name", ["map", "map, drop_last"])
def test_only_the_number_of_batches_is_known(name: str) -> None:
    """With another number of ranks, or a stock checkpoint: no sample is lost, and the last batch is filled up."""
    for stock, resumed in _on_ranks(2, jobs.from_the_third, name):
        assert stock == resumed


def test_stopped_in_the_first_step() -> None:
    assert _on_ranks(2, jobs.without_a_mark, "stream") == [True] * 2
