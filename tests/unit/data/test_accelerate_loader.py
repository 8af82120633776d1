"""Loaders that accelerate has prepared: it fetches each batch before the step with the batch before it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from accelerate import Accelerator, skip_first_batches
from accelerate.data_loader import prepare_data_loader
from accelerate.utils import DataLoaderConfiguration
from torch.utils.data import DataLoader

from reprieve.data.resumable_loader import ResumableLoader
from tests.support.data_kit import Augmented, Plain, RandomCollator, Shards, Unaware, bare, same, through

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    from accelerate.state import AcceleratorState, GradientState

    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def _prepared(make: Callable[[], DataLoader[Any]], **options: Any) -> Callable[[], Any]:
    def prepare() -> Any:
        accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**options))
        return accelerator.prepare(make())

    return prepare


@pytest.mark.parametrize("seedable", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        lambda: DataLoader(Augmented(), batch_size=4, shuffle=True),
        lambda: DataLoader(Plain(), batch_size=4, shuffle=True, collate_fn=RandomCollator()),
        lambda: DataLoader(Shards(), batch_size=4),  # dispatched by default
        lambda: DataLoader(Augmented(), batch_size=4, shuffle=True, num_workers=2),
        lambda: DataLoader(Augmented(), batch_size=4, shuffle=True, num_workers=2, persistent_workers=True),
    ],
    ids=["augmented", "collator", "iterable", "workers", "persistent workers"],
)
def test_a_prepared_loader(make: Callable[[], DataLoader[Any]], seedable: bool) -> None:
    prepare = _prepared(make, use_seedable_sampler=seedable)
    expected = bare(prepare)
    for stops in ([], [(0, 1), (0, 2), (0, 3)], [(0, 6), (1, 0), (1, 5), (2, 6)], [(1, 1), (1, 4)]):
        assert same(through(prepare, stops), expected), stops


@pytest.mark.parametrize("workers", [0, 2])
def test_an_iterable_that_is_not_dispatched(workers: int) -> None:
    prepare = _prepared(lambda: DataLoader(Shards(), batch_size=4, num_workers=workers), dispatch_batches=False)
    expected = bare(prepare)
    for stops in ([], [(0, 1), (0, 2), (0, 3)], [(0, 6), (1, 5), (2, 6)]):
        assert same(through(prepare, stops), expected), stops


def test_one_shard_of_several() -> None:
    def prepare() -> Any:
        Accelerator(cpu=True)
        return prepare_data_loader(
            DataLoader(Augmented(), batch_size=2, shuffle=True),
            num_processes=3,
            process_index=1,
            use_seedable_sampler=True,
        )

    expected = bare(prepare)
    for stops in ([], [(0, 1), (0, 3)], [(1, 2), (2, 4)]):
        assert same(through(prepare, stops), expected), stops


def test_skipped_batches() -> None:
    prepare = _prepared(lambda: DataLoader(Augmented(), batch_size=4))

    def skipping() -> Any:
        return skip_first_batches(prepare(), 2)

    expected = bare(skipping, epochs=1)
    assert len(expected[0]) == 5
    for stops in ([], [(0, 1), (0, 3)]):
        assert same(through(skipping, stops, epochs=1), expected), stops


def test_the_users_loader_is_as_it_was() -> None:
    loader = _prepared(lambda: DataLoader(Unaware(), batch_size=4))()
    before = dict(vars(loader))
    loader_pass = ResumableLoader(loader).start()
    next(loader_pass)
    loader_pass.mark()
    assert loader.gradient_state.active_dataloader is not None
    assert {key: value for key, value in vars(loader).items() if before[key] is not value} == {}
    list(loader_pass)
    assert loader.gradient_state.active_dataloader is None
    assert loader.iteration == 1


def test_entered_again_at_its_end() -> None:
    """A pass resumed at its end yields nothing, also after another stop."""
    prepare = _prepared(lambda: DataLoader(Plain(), batch_size=4))
    loader_pass = ResumableLoader(prepare()).start()
    for _ in range(6):
        next(loader_pass)
    loader_pass.mark()
    saved = loader_pass.state()
    for _ in range(2):
        loader = prepare()
        loader_pass = ResumableLoader(loader).start(saved)
        assert list(loader_pass) == []
        assert loader.iteration == 1
        loader_pass.mark()
        saved = loader_pass.state()
        assert saved["consumed"] == 6


def test_iterated_before() -> None:
    """Accelerate's flag for the end of a loader belongs to an earlier iteration."""
    prepare = _prepared(lambda: DataLoader(Plain(), batch_size=4))
    loader = prepare()
    list(loader)
    loader_pass = ResumableLoader(loader).start()
    loader_pass.mark()
    next(loader_pass)
    loader_pass.mark()
    assert len(list(ResumableLoader(prepare()).start(loader_pass.state()))) == 5
