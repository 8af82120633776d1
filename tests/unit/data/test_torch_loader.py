"""A torch DataLoader, stopped anywhere and resumed: the same batches and the same random numbers, bit for bit."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from reprieve.data.resumable_loader import ResumableLoader
from tests.support.data_kit import AtOnce, Augmented, Plain, RandomCollator, bare, same, through

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


class Backwards(Sampler[list[int]]):
    """A batch sampler that draws when an iteration starts, not at its first batch."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(self.size).tolist()
        return iter([order[at : at + 5] for at in range(0, self.size, 5)][::-1])

    def __len__(self) -> int:
        return (self.size + 4) // 5


class Remembering(Sampler[int]):
    """A sampler that shuffles with its own random numbers and counts its passes."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.own = random.Random(3)
        self.passes = 0

    def __iter__(self) -> Iterator[int]:
        self.passes += 1
        order = list(range(self.size))
        self.own.shuffle(order)
        yield from [(index + self.passes) % self.size for index in order]

    def __len__(self) -> int:
        return self.size

    def state_dict(self) -> dict[str, Any]:
        return {"own": self.own.getstate(), "passes": self.passes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.own.setstate(state["own"])
        self.passes = state["passes"]


def _generator(number: int = 5) -> torch.Generator:
    return torch.Generator().manual_seed(number)


def _drawing_sampler(dataset: Any) -> dict[str, Any]:
    """A sampler that draws from its generator throughout a pass."""
    return {
        "sampler": RandomSampler(dataset, replacement=True, num_samples=150, generator=_generator()),
        "batch_size": 8,
    }


SAMPLERS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "shuffle": lambda data: {"shuffle": True, "batch_size": 4},
    "shuffle, drop_last": lambda data: {"shuffle": True, "batch_size": 4, "drop_last": True},
    "in order": lambda data: {"batch_size": 4},
    "own generator": lambda data: {"shuffle": True, "batch_size": 4, "generator": _generator()},
    "generator of the sampler": lambda data: {"sampler": RandomSampler(data, generator=_generator()), "batch_size": 4},
    "with replacement": lambda data: {"sampler": RandomSampler(data, replacement=True), "batch_size": 4},
    "drawing": _drawing_sampler,
    "more than once": lambda data: {
        "sampler": RandomSampler(data, num_samples=46, generator=_generator()),
        "batch_size": 7,
    },
    "weighted": lambda data: {
        "sampler": WeightedRandomSampler([1.0 + i for i in range(len(data))], 30),
        "batch_size": 4,
    },
    "subset": lambda data: {"sampler": SubsetRandomSampler(range(3, 20)), "batch_size": 3},
    "distributed": lambda data: {"sampler": DistributedSampler(data, num_replicas=3, rank=1), "batch_size": 2},
    "batch sampler": lambda data: {"batch_sampler": BatchSampler(RandomSampler(data), 4, drop_last=False)},
    "eager batch sampler": lambda data: {"batch_sampler": Backwards(len(data))},
    "with a state": lambda data: {"sampler": Remembering(len(data)), "batch_size": 4},
    "single samples": lambda data: {"batch_size": None, "shuffle": True},
    "single samples in order": lambda data: {"batch_size": None, "sampler": SequentialSampler(data)},
}
DATASETS: dict[str, tuple[type[Dataset[Any]], Any]] = {
    "augmented": (Augmented, None),
    "random collator": (Plain, RandomCollator()),
    "deterministic": (Plain, None),
    "whole batches": (AtOnce, None),
}


def _make(sampler: str, dataset: str, workers: int, persistent: bool) -> Callable[[], DataLoader[Any]]:
    def make() -> DataLoader[Any]:
        kind, collate = DATASETS[dataset]
        data = kind()
        options = SAMPLERS[sampler](data)
        return DataLoader(
            data, collate_fn=collate, num_workers=workers, persistent_workers=persistent and workers > 0, **options
        )

    return make


@pytest.mark.parametrize("dataset", DATASETS)
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_without_workers(sampler: str, dataset: str) -> None:
    make = _make(sampler, dataset, 0, False)
    expected = bare(make)
    assert same(through(make, []), expected), "not even without a stop"
    counts = [len(trace) - 1 for trace in expected[:3]]
    for stop in [(0, 0), (0, 1), (0, 3), (0, counts[0]), (1, 0), (1, 2), (2, counts[2] - 1), (2, counts[2])]:
        assert same(through(make, [stop]), expected), stop
    assert same(through(make, [(0, 1), (0, 2), (1, 1), (1, counts[1]), (2, 3)]), expected)


def _chosen() -> Iterator[tuple[str, str, int, bool]]:
    """Each sampler once, with one of the other combinations: each case starts about 20 workers."""
    others = list(itertools.product(DATASETS, (2, 4), (False, True)))
    random.Random(4).shuffle(others)
    for sampler, other in zip(SAMPLERS, others, strict=True):
        yield sampler, *other


@pytest.mark.parametrize(("sampler", "dataset", "workers", "persistent"), list(_chosen()))
def test_with_workers(sampler: str, dataset: str, workers: int, persistent: bool) -> None:
    make = _make(sampler, dataset, workers, persistent)
    expected = bare(make)
    counts = [len(trace) - 1 for trace in expected[:3]]
    chance = random.Random(f"{sampler} {dataset} {workers} {persistent}")
    stops = [(epoch, chance.choice([0, 1, 2, 3, counts[epoch] - 1, counts[epoch]])) for epoch in range(3)]
    assert same(through(make, stops), expected), stops


@pytest.mark.parametrize("persistent", [False, True])
def test_every_position_with_workers(persistent: bool) -> None:
    make = _make("shuffle", "augmented", 2, persistent)
    expected = bare(make, epochs=2)
    for stops in ([(0, 1), (0, 2), (0, 3), (0, 4), (0, 5), (0, 6)], [(1, 0), (1, 1), (1, 4), (1, 5), (1, 6)], []):
        assert same(through(make, stops, epochs=2), expected), stops


@pytest.mark.parametrize("workers", [0, 2])
def test_a_step_that_is_given_up(workers: int) -> None:
    """After the mark, two batches were yielded and further indices drawn: the resumed pass draws them again."""
    expected = bare(_make("drawing", "deterministic", workers, False), epochs=1)[0]
    make = _make("drawing", "deterministic", workers, False)
    source = ResumableLoader(make())
    loader_pass = source.start()
    for _ in range(3):
        next(loader_pass)
    loader_pass.mark()
    for _ in range(2):
        next(loader_pass)
    saved = loader_pass.state(), source.state()
    source.end_workers()
    source = ResumableLoader(make())
    source.restore(saved[1])
    rest = [batch["index"] for batch in source.start(saved[0])]
    assert same(rest, [batch["index"] for batch, _ in expected[3:-1]])
