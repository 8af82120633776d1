"""Streams of Hugging Face `datasets` in common shapes, stopped and resumed: the batches are those of the bare loader.
`make soak` tests every combination, the normal run every pair of choices."""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Callable
from typing import Any

import datasets
import pytest
from datasets import Dataset, concatenate_datasets, interleave_datasets
from datasets.distributed import split_dataset_by_node
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from tests.support.data_kit import bare, same, through
from tests.support.pairwise import covering, everything

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),  # torchdata calls it
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
SOAK = bool(os.environ.get("REPRIEVE_SOAK"))


def _stream(shards: int, first: int = 0, count: int = 48) -> Any:
    return Dataset.from_dict({"x": list(range(first, first + count))}).to_iterable_dataset(num_shards=shards)


def _doubled(rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
    return {"x": [value for value in rows["x"] for _ in range(2)]}


def _as_it_is(batch: Any) -> Any:
    return batch


def _packed(table: Any) -> Any:
    """Pack as TRL does: tables in, fewer rows out."""
    return table.slice(0, (len(table) + 1) // 2)


def _others(shards: int) -> Any:
    return _stream(shards, 5000, 30)


SHAPES: dict[str, Callable[[Any, int], Any]] = {
    "plain": lambda data, shards: data,
    "map": lambda data, shards: data.map(lambda row: {"x": row["x"] + 1000, "noise": random.random()}),
    "batched_map": lambda data, shards: data.map(_doubled, batched=True, batch_size=7),
    "packing": lambda data, shards: (
        data.with_format("arrow").map(_packed, batched=True, batch_size=7).with_format(None)
    ),
    "filter": lambda data, shards: data.filter(lambda row: row["x"] % 3 != 0),
    "batch": lambda data, shards: data.batch(3),
    "interleave": lambda data, shards: interleave_datasets([data, _others(shards)]),
    "interleave_at_random": lambda data, shards: interleave_datasets(
        [data, _others(shards)], probabilities=[0.7, 0.3], seed=3, stopping_strategy="all_exhausted"
    ),
    "concatenate": lambda data, shards: concatenate_datasets([data, _others(shards)]),
    "take_and_skip": lambda data, shards: data.skip(3).take(40),
    "repeat": lambda data, shards: data.repeat(2),
    "torch_format": lambda data, shards: data.with_format("torch"),
}
SHUFFLES = ("never", "first", "last")
SHARDS = (1, 2, 4)
LOADERS = (
    (DataLoader, 0), (DataLoader, 1), (DataLoader, 2), (DataLoader, 4),
    (StatefulDataLoader, 0), (StatefulDataLoader, 2),
)  # fmt: skip
NODES = (1, 2)
STOPS = ("first batch", "middle", "second pass")
CHOICES = [tuple(SHAPES), SHUFFLES, SHARDS, LOADERS, NODES, STOPS]
CASES = everything(CHOICES) if SOAK else covering(CHOICES)


def _name(case: tuple[Any, ...]) -> str:
    shape, shuffle, shards, (loader, workers), nodes, stop = case
    return f"{shape}, shuffled {shuffle}, {shards} shards, {loader.__name__} {workers}, {nodes} nodes, {stop}"


@pytest.mark.soak
@pytest.mark.parametrize("case", CASES, ids=_name)
def test_a_resumed_stream_gives_the_batches_of_the_bare_loader(case: tuple[Any, ...]) -> None:
    shape, shuffle, shards, (loader, workers), nodes, stop = case

    def make() -> Any:
        data = _stream(shards)
        if shuffle == "first":
            data = data.shuffle(seed=5, buffer_size=10)
        data = SHAPES[shape](data, shards)
        if shuffle == "last":
            data = data.shuffle(seed=5, buffer_size=10)
        if nodes > 1:
            data = split_dataset_by_node(data, rank=1, world_size=nodes)
        return loader(data, batch_size=None if shape == "batch" else 2, num_workers=workers, collate_fn=_as_it_is)

    datasets.logging.set_verbosity_error()
    expected = bare(make, epochs=2)
    count = len(expected[0]) - 1
    stops = {"first batch": [(0, 1)], "middle": [(0, count // 2), (0, count - 1)], "second pass": [(1, 1), (1, 3)]}
    got = through(make, stops[stop], epochs=2)
    if shape == "map" and (shuffle == "last" or (loader is StatefulDataLoader and workers)):
        # Two bare runs also differ if random items go through a shuffle buffer, and torchdata does not restore the
        # random numbers of its workers.
        expected, got = _without_noise(expected), _without_noise(got)
    assert same(got, expected)


def _without_noise(traces: list[Any]) -> list[Any]:
    return [[row["x"] for step in trace if isinstance(step[0], list) for row in step[0]] for trace in traces[:2]]


@pytest.mark.skipif(datasets.__version__ < "5.2", reason="positions of older versions are never loaded")
@pytest.mark.parametrize("loader", [DataLoader, StatefulDataLoader])
def test_a_position_that_cannot_be_loaded_is_read_up_to(loader: Any, caplog: pytest.LogCaptureFixture) -> None:
    """`datasets` first loads the position of a worker's shards into the whole stream, which it does not fit."""

    def make() -> Any:
        return loader(SHAPES["concatenate"](_stream(1), 1), batch_size=3, num_workers=2, collate_fn=list)

    expected = bare(make, epochs=2)
    with caplog.at_level(logging.WARNING, "reprieve"):
        assert same(through(make, [(0, 4), (0, 9), (1, 5)], epochs=2), expected)
    assert "IndexError" in caplog.text
    assert "reading 4 batches again to find the position" in caplog.text


def test_a_shuffled_stream_logs_why_it_is_read_again(caplog: pytest.LogCaptureFixture) -> None:
    def make() -> Any:
        return DataLoader(_stream(4).shuffle(seed=5, buffer_size=10), batch_size=3, num_workers=2, collate_fn=list)

    with caplog.at_level(logging.WARNING, "reprieve"):
        through(make, [(0, 4)], epochs=1)
    assert "has a shuffle buffer, which its state_dict leaves out: reading 4 batches again" in caplog.text
