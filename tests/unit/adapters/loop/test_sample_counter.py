"""How many samples and tokens a loop has trained on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler, SequentialSampler, TensorDataset

import reprieve
from reprieve.adapters.loop.sample_counter import BatchSizes, SampleCounter, batch_sizes

TEN = TensorDataset(torch.zeros(10, 2))


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


class NoLength(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


@pytest.mark.parametrize(
    ("loader", "found"),
    [
        (DataLoader(TEN, 4), [4, 4, 2]),
        (DataLoader(TEN, 4, drop_last=True), [4, 4]),
        (DataLoader(TEN, 5, shuffle=True), [5, 5]),
        (DataLoader(TEN, 64), [10]),
        (DataLoader(TEN, 4, sampler=NoLength()), [4, 4, 4]),
        (DataLoader(Stream(), 5), [5, 5]),
        (DataLoader(TEN, batch_size=None), [0] * 10),
        (DataLoader(TEN, batch_sampler=BatchSampler(SequentialSampler(TEN), 4, drop_last=False)), [0, 0, 0]),
        ([1, 2], [0, 0]),
    ],
)
def test_what_a_loader_says_of_its_batches(loader: Any, found: list[int]) -> None:
    one = batch_sizes(loader, 1)
    assert [one.of(number) for number, _ in enumerate(loader, 1)] == found


class Prepared:
    """As accelerate prepares one for two ranks."""

    def __init__(self, total: Any) -> None:
        self.base_dataloader = DataLoader(TEN, 4)
        self.total_batch_size = total


@pytest.mark.parametrize(("total", "size"), [(8, 4), (None, 0)])
def test_a_loader_of_accelerate_says_it_of_all_ranks(total: Any, size: int) -> None:
    assert batch_sizes(Prepared(total), 2) == BatchSizes(size)


def test_what_the_loop_says_counts() -> None:
    counting = SampleCounter()
    counting.world_size = 2
    counting.pending = 4
    counting.step(None, None)
    assert (counting.samples, counting.tokens) == (8, 0)
    counting.pending = 4
    counting.step(7, torch.tensor(100))  # type: ignore[arg-type]
    counting.step(None, 50)
    assert (counting.samples, counting.tokens) == (15, 150)


def test_what_is_no_count() -> None:
    with pytest.raises(reprieve.ConfigError, match="tokens is float and not a whole number"):
        SampleCounter().step(None, 1.5)  # type: ignore[arg-type]


def test_a_run_counts_completed_steps(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 1)
    seen = []
    with reprieve.Run(tmp_path, model=model, notices="off") as run:
        for _ in run.epochs(2):
            for _batch in run.batches(DataLoader(TEN, 4)):
                if run.batch % 2 == 0 or run.batch == 3:
                    run.step(tokens=10, loss=1.0)
                at = run._adapter.position()
                seen.append((at.samples, at.tokens))
    assert seen == [(0, 0), (8, 10), (10, 20), (10, 20), (18, 30), (20, 40)]
