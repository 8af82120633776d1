"""Redistribution to batches of another size: each remaining sample comes once; and loaders that cannot do so."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from accelerate.data_loader import IterableDatasetShard
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
    get_worker_info,
)

from reprieve.data.positions import PassPosition, Redistribution
from reprieve.data.redistribution import SampleRedistribution
from reprieve.data.resumable_loader import ResumableLoader
from reprieve.rng import capture_rng, restore_rng
from tests.support.data_kit import Plain, Unaware, seed

KNOWN = {"consumed": 3, "read": 3, "size": 4}
SAMPLES = 24


class Shuffled(IterableDataset[int]):
    """Shuffles at its start, with the global generator. Has no state_dict."""

    def __iter__(self) -> Iterator[int]:
        order = list(range(SAMPLES))
        random.shuffle(order)
        yield from order


class Uneven(IterableDataset[int]):
    """Gives two workers parts of 18 and 6 samples."""

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        parts = [range(18), range(18, SAMPLES)] if info is not None and info.num_workers == 2 else [range(SAMPLES)]
        yield from parts[info.id if info is not None else 0]


class Indices(Plain):
    def __init__(self) -> None:
        super().__init__(SAMPLES)

    def __getitem__(self, index: int) -> int:
        return index


class Growing(BatchSampler):
    """A batch sampler whose batches have different sizes."""

    def __iter__(self) -> Iterator[list[int]]:
        yield from ([0], [1, 2], [3, 4, 5])


class Repeating(SequentialSampler):
    """A sampler that is recognised as TRL's by its attribute."""

    mini_repeat_count = 2


def _known(loader: Any, **more: Any) -> dict[str, Any] | None:
    return ResumableLoader(loader).redistribute({**KNOWN, **more}, 1)


class Run:
    """A run of several passes that is stopped and resumed, with the same batch size or another."""

    def __init__(self, make: Callable[[int], Any]) -> None:
        self._make = make
        self._saved: tuple[Any, Any, Any] | None = None

    def run(self, size: int, counts: Sequence[int | None], *, redistribute: bool = False) -> list[list[int]]:
        """Run passes of so many batches; None: to the end. The first continues the pass that was stopped."""
        seed(1 if self._saved is None else 7)
        source = ResumableLoader(self._make(size))
        position, rng = None, capture_rng({})
        if self._saved is not None:
            position, state, rng = self._saved
            source.restore(
                {name: value for name, value in state.items() if name != "workers"} if redistribute else state
            )
            if redistribute:
                position = source.redistribute(position, 1)
                assert position is not None
        seen = []
        for count in counts:
            loader_pass = source.start(position, before_first_fetch=partial(restore_rng, rng, {}))
            seen.append(_take(loader_pass, count))
            position, rng = loader_pass.state(), capture_rng({})
            self._saved = position, source.state(), rng
            if count is None:
                position = None
        source.end_workers()
        return seen


def _take(loader_pass: Any, count: int | None) -> list[int]:
    found: list[int] = []
    for number, batch in enumerate(loader_pass, 1):
        found += batch.tolist()
        loader_pass.mark()
        if number == count:
            break
    return found


LOADERS: dict[str, Callable[[int], Any]] = {
    "shuffled": lambda size: DataLoader(Indices(), size, shuffle=True),
    "with a generator": lambda size: DataLoader(Indices(), size, sampler=RandomSampler(Indices(), generator=_seeded())),
    "weighted": lambda size: DataLoader(
        Indices(), size, sampler=WeightedRandomSampler([1.0] * SAMPLES, SAMPLES, replacement=False)
    ),
    "workers": lambda size: DataLoader(Indices(), size, shuffle=True, num_workers=2),
    "persistent workers": lambda size: DataLoader(
        Indices(), size, shuffle=True, num_workers=2, persistent_workers=True
    ),
    "a stream": lambda size: DataLoader(Shuffled(), size),
    "a shard of one": lambda size: DataLoader(IterableDatasetShard(Shuffled(), size, num_processes=1), size),
    "uneven parts": lambda size: DataLoader(Uneven(), size, num_workers=2),
    "uneven parts, persistent workers": lambda size: DataLoader(Uneven(), size, num_workers=2, persistent_workers=True),
}


def _seeded() -> torch.Generator:
    return torch.Generator().manual_seed(5)


@pytest.mark.parametrize("earlier", [0, 1])
@pytest.mark.parametrize("name", LOADERS)
def test_each_sample_comes_once(name: str, earlier: int) -> None:
    """This also holds in the second epoch, in the epoch after it, and after another stop."""
    parts, again = Run(LOADERS[name]), Run(LOADERS[name])
    whole = [None] * earlier
    first = parts.run(4, [*whole, 4])[-1]
    assert again.run(4, [*whole, 4])[-1] == first
    second, third = parts.run(3, [None, None], redistribute=True)
    if name == "a shard of one":
        assert second.pop() == second[0], "it fills the last batch up"
    assert sorted(first + second) == list(range(SAMPLES))
    assert sorted(third) == list(range(SAMPLES))
    batch = again.run(3, [1], redistribute=True)[-1]
    rest = again.run(3, [None])[-1]
    assert (batch + rest)[: len(second)] == second, "after the stop as without it"


def test_other_workers_after_it() -> None:
    """The parts of the new workers are unknown, and nothing breaks."""
    with_workers = Run(lambda size: DataLoader(Uneven(), size, num_workers=0 if size == 4 else 2))
    run = Run(lambda size: DataLoader(Uneven(), size))
    run.run(4, [2])
    run.run(3, [1], redistribute=True)
    with_workers._saved = run._saved
    assert set(with_workers.run(3, [None])[-1]) <= set(range(SAMPLES))


def test_whole_rounds_only() -> None:
    """The remaining 12 of 24 samples are 4 batches of 3; three ranks take one each."""
    loader = DataLoader(Indices(), 3)
    position = PassPosition(redistribution=Redistribution(samples=12, first_batch=1))
    assert SampleRedistribution(loader, 3, drop_last=True).length(position) == 1 + 1
    assert SampleRedistribution(loader, 3, drop_last=False).length(position) == 1 + 2


def test_nothing_was_done() -> None:
    position = {"consumed": 0, "start": {}, "read": 0, "size": 4}
    assert ResumableLoader(DataLoader(Plain(), 5)).redistribute(position, 1) == {
        "version": 1,
        "consumed": 0,
        "start": {},
    }


def test_a_plain_loader() -> None:
    loader = DataLoader(Plain(23), 5)
    position = _known(loader)
    assert position == {"version": 1, "consumed": 2, "dealt": {"samples": 12, "at": 2}}
    source = ResumableLoader(loader)
    assert source.length(position) == 2 + 3
    loader_pass = source.start(position)
    first = next(loader_pass)
    loader_pass.mark()
    assert first["index"].tolist() == [12, 13, 14, 15, 16]
    assert [batch["index"].tolist() for batch in ResumableLoader(loader).start(loader_pass.state())] == [
        [17, 18, 19, 20, 21],
        [22],
    ]


def test_dealt_out_again_before_anything_was_given_out() -> None:
    position = _known(DataLoader(Plain(23), 5))
    assert position is not None
    source = ResumableLoader(DataLoader(Plain(23), 3))
    assert source.redistribute(source.start(position).state(), 1) == {
        "version": 1,
        "consumed": 4,
        "dealt": {"samples": 12, "at": 4},
    }


def test_the_number_of_batches_is_a_multiple() -> None:
    position = ResumableLoader(DataLoader(Plain(23), 2)).redistribute(KNOWN, 4)
    assert position == {"version": 1, "consumed": 4, "dealt": {"samples": 12, "at": 4}}


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(Plain(), batch_sampler=Growing(SequentialSampler(Plain()), 2, drop_last=False)),
        DataLoader(Plain(), 2, sampler=Repeating(Plain())),
        DataLoader(Plain(), batch_size=None),
        [[1], [2]],
    ],
    ids=["a batch sampler of its own", "what belongs together", "no batches", "no loader"],
)
def test_a_loader_that_nobody_knows(loader: Any) -> None:
    assert _known(loader) is None


def test_a_position_that_does_not_say_how_much_it_is() -> None:
    assert ResumableLoader(DataLoader(Plain(), 2)).redistribute({"consumed": 3}, 1) is None


def test_a_stream_with_other_workers() -> None:
    """Other workers read other parts of it."""
    loader = DataLoader(Unaware(), 2, num_workers=2)
    assert _known(loader, apart=1, given=[2, 1]) is not None
    assert _known(loader, apart=1, given=[3]) is None
    assert _known(loader, apart=1, given=[2, 1], dealt={"samples": 3, "at": 0}) is not None
    assert _known(loader, apart=1, given=[2, 1], dealt={"samples": 3, "parts": [3], "at": 0}) is None


def test_a_stream_of_which_each_rank_read_its_own_part() -> None:
    assert _known(DataLoader(Unaware(), 2), apart=2, given=[]) is None
