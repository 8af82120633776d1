"""Redistribution to another number of ranks: each remaining sample comes once, wherever the earlier batches ended."""

from __future__ import annotations

from collections import Counter

import pytest

from reprieve.testing import run_ranks, values
from tests.support.jobs import redistribution_jobs as jobs
from tests.support.jobs.hf_jobs import PRELOAD
from tests.support.jobs.redistribution_jobs import CASES, SAMPLES, Part

Parts = list[dict[str, Part]]
"""The parts of all ranks, by rank and case."""


def _on_ranks(ranks: int, count: int | None, before: Parts | None = None, *, redistribute: bool = True) -> Parts:
    return values(run_ranks(ranks, jobs.read_batches, count, before, redistribute, modules=PRELOAD))


@pytest.fixture(scope="module")
def parts() -> list[Parts]:
    """8 samples on two ranks, 6 on three, 6 on one, and the other 12 on three ranks again, which are stopped once."""
    found = [_on_ranks(2, 2)]
    found.append(_on_ranks(3, 1, found[-1]))
    found.append(_on_ranks(1, 3, found[-1]))
    found.append(_on_ranks(3, 1, found[-1]))
    found.append(_on_ranks(3, None, found[-1], redistribute=False))
    return found


@pytest.mark.parametrize("name", CASES)
def test_each_sample_comes_once(parts: list[Parts], name: str) -> None:
    seen = [[sample for rank in part for sample in rank[name].samples] for part in parts]
    assert [len(part) for part in seen] == [8, 6, 6, 6, 6]
    assert Counter(sample for part in seen for sample in part) == Counter(range(SAMPLES))


@pytest.mark.parametrize("name", CASES)
def test_how_many_batches_there_will_be(parts: list[Parts], name: str) -> None:
    [first, *_], [last, *_] = parts[3], parts[4]
    if CASES[name].dataset in (jobs.Stream, jobs.Knowing):
        assert first[name].length is None
    else:
        assert first[name].length == last[name].position["consumed"] == 20 // 6 + 2


@pytest.mark.parametrize("name", CASES)
def test_the_number_of_batches_goes_on(parts: list[Parts], name: str) -> None:
    """Batches are numbered as if all earlier ones had been like these."""
    numbers = [{rank[name].position["consumed"] for rank in part} for part in parts]
    assert numbers == [{2}, {8 // 6 + 1}, {14 // 2 + 3}, {20 // 6 + 1}, {20 // 6 + 2}], "the same on all ranks"
