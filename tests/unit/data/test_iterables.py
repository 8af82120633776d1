"""Iterable datasets, and loaders that are not a DataLoader, stopped and resumed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import reprieve.data.replay
from reprieve.data.resumable_loader import ResumableLoader
from reprieve.rng import capture_rng, restore_rng
from tests.support.data_kit import Counted, Plain, Shards, Unaware, bare, draw, same, through

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


def _make(dataset: type[Any], workers: int, **options: Any) -> Callable[[], DataLoader[Any]]:
    return lambda: DataLoader(dataset(), num_workers=workers, **{"batch_size": 2, **options})


@pytest.mark.parametrize("batch_size", [2, None])
@pytest.mark.parametrize("dataset", [Shards, Counted])
def test_an_iterable_that_says_where_it_is(dataset: type[Any], batch_size: int | None) -> None:
    make = _make(dataset, 0, batch_size=batch_size)
    expected = bare(make)
    counts = [len(trace) - 1 for trace in expected[:3]]
    for stops in ([], [(0, 0), (0, 1), (0, 2), (1, 5)], [(0, counts[0]), (1, 0), (2, counts[2])]):
        assert same(through(make, stops), expected), stops


@pytest.mark.parametrize(
    ("dataset", "workers", "options"),
    [
        (Shards, 2, {}),
        (Shards, 4, {"drop_last": True}),
        (Shards, 3, {"batch_size": None}),
        (Counted, 2, {}),
    ],
)
def test_an_iterable_in_workers(dataset: type[Any], workers: int, options: dict[str, Any]) -> None:
    """The parts of the workers are not equal: some workers end early and stay ended."""
    make = _make(dataset, workers, **options)
    expected = bare(make, epochs=2)
    count = len(expected[0]) - 1
    stops = [(0, 1), (0, 2), (0, 7), (1, count - 1)]
    assert same(through(make, stops, epochs=2), expected), stops


def test_persistent_workers_of_an_iterable() -> None:
    make = _make(Counted, 2, persistent_workers=True)
    expected = bare(make)
    assert same(through(make, [(0, 3), (1, 0), (1, 2), (2, 5)]), expected)


@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (2, False), (2, True)])
def test_an_iterable_that_cannot_tell_is_read_again(
    workers: int, persistent: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    make = _make(Unaware, workers, persistent_workers=persistent)
    expected = bare(make)
    monkeypatch.setattr(reprieve.data.replay, "SHOW_BAR_AFTER_S", 0.0)
    with caplog.at_level(logging.WARNING, "reprieve"):
        assert same(through(make, [(0, 3), (1, 2), (1, 7)]), expected)
    assert "the dataset Unaware has no state_dict" in caplog.text
    assert "reading 3 batches again" in caplog.text


def test_steps_of_several_batches() -> None:
    """The state is that of the last mark, even if more batches were yielded since."""
    for make in (
        _make(Shards, 0),
        _make(Shards, 2),
        lambda: DataLoader(Plain(), batch_size=2, shuffle=True, num_workers=2),
    ):
        loader = make()
        source = ResumableLoader(loader)
        loader_pass = source.start()
        seen = [next(loader_pass) for _ in range(3)]
        loader_pass.mark()
        rng = capture_rng({})
        seen += [next(loader_pass), next(loader_pass)]
        saved = loader_pass.state(), source.state()
        source.end_workers()
        assert saved[0]["consumed"] == 3

        draw()
        source = ResumableLoader(make())
        source.restore(saved[1])
        again = source.start(saved[0], before_first_fetch=lambda rng=rng: restore_rng(rng, {}))
        items = [next(again), next(again)]
        source.end_workers()
        for batch, other in zip(seen[3:], items, strict=True):
            for key in ("item", "index"):
                assert same(batch.get(key), other.get(key))


class Stateful:
    """A loader with its own state, like torchdata's."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[Any]:
        while self.at < 9:
            self.at += 1
            yield [self.at - 1, draw()]
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class Endless:
    """A loader that can only be read from its start."""

    def __iter__(self) -> Iterator[Any]:
        yield from torch.randperm(9).tolist()


class Old:
    """A loader without `__iter__`, which Python iterates by index."""

    def __getitem__(self, index: int) -> Any:
        if index >= 9:
            raise IndexError
        return index


@pytest.mark.parametrize("make", [Stateful, Endless, Old, lambda: list(range(9)), lambda: range(9)])
def test_other_iterables(make: Callable[[], Any]) -> None:
    expected = bare(make)
    for stops in ([], [(0, 1), (0, 2)], [(0, 9), (1, 0)], [(1, 3), (2, 8)]):
        assert same(through(make, stops), expected), stops


def test_a_count_alone_is_a_position() -> None:
    """After a change of the number of ranks, nothing else of a position remains."""
    for workers in (0, 2):
        source = ResumableLoader(DataLoader(Plain(), batch_size=2, num_workers=workers))
        loader_pass = source.start({"consumed": 3})
        assert next(loader_pass)["index"].tolist() == [6, 7]
        assert next(loader_pass)["index"].tolist() == [8, 9]
        source.end_workers()
    source = ResumableLoader(_make(Unaware, 2)())
    assert next(source.start({"consumed": 3}))["item"].tolist() == [5, 7]
    source.end_workers()


def test_another_number_of_workers(caplog: pytest.LogCaptureFixture) -> None:
    source = ResumableLoader(DataLoader(Plain(), batch_size=2, num_workers=2))
    going = source.start()
    for _ in range(3):
        next(going)
    going.mark()
    saved = going.state()
    source.end_workers()
    source = ResumableLoader(DataLoader(Plain(), batch_size=2, num_workers=3))
    assert next(source.start(saved))["index"].tolist() == [6, 7]
    source.end_workers()
    assert "had 2 DataLoader workers and has 3 now" in caplog.text
