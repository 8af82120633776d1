"""What ranks do in the tests of accelerate's dispatcher: many loaders in one process, because to start ranks takes
time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.data_loader import DataLoaderDispatcher, prepare_data_loader
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DataLoaderConfiguration
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, default_collate

from reprieve.data.resumable_loader import ResumableLoader
from tests.support.data_kit import Augmented, Shards, Trace, Unaware, attempt, bare, draw, same, seed, through

Place = tuple[int, int]
"""An epoch, and how many of its batches are done: -1 is all, -2 all but the last."""


class Masked(NamedTuple):
    """A batch that `torch.load(weights_only=True)` does not load."""

    samples: dict[str, Any]
    mask: torch.Tensor


class Masks:
    """A collator that draws, for batches that can be put together and cut."""

    def __call__(self, samples: Any) -> Any:
        return Masked(default_collate(samples), torch.tensor([draw() for _ in samples]))


class Drawing(Shards):
    """Draws once more at its end, say for the order of the next epoch."""

    def __iter__(self) -> Any:
        yield from super().__iter__()
        draw()


LOADERS: Mapping[str, Callable[..., DataLoader[Any]]] = {
    # One sample beyond the full batches: the last one is filled up, and is made of fewer of the real loader's.
    "map": lambda ranks, **more: DataLoader(Augmented(8 * ranks + 1), shuffle=True, collate_fn=Masks(), **more),
    "map, full": lambda ranks, **more: DataLoader(Augmented(8 * ranks), shuffle=True, **more),
    # One batch and a sample too many: read, and dropped.
    "map, drop_last": lambda ranks, **more: DataLoader(Augmented(8 * ranks + 3), shuffle=True, drop_last=True, **more),
    "stream": lambda ranks, **more: DataLoader(Shards(8 * ranks + 1), collate_fn=Masks(), **more),
    "stream, drop_last": lambda ranks, **more: DataLoader(Shards(8 * ranks + 3), drop_last=True, **more),
    # One batch too many: while it waits for the others of its round, the stream is at its end.
    "stream, drawing": lambda ranks, **more: DataLoader(Drawing(8 * ranks + 2), **more),
    "stream that cannot tell": lambda ranks, **more: DataLoader(Unaware(), **more),
}
"""Batches of two samples a rank, so that an epoch has four full ones."""


def dispatched(name: str, split: bool, more: Mapping[str, Any]) -> Callable[[], Any]:
    ranks, rank = dist.get_world_size(), dist.get_rank()
    # Streams are dispatched by default.
    config = DataLoaderConfiguration(split_batches=split, dispatch_batches=None if name.startswith("stream") else True)

    def make() -> Any:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        for _ in range(rank):
            draw()  # no two ranks have the same random numbers
        loader = LOADERS[name](ranks, batch_size=2 * ranks if split else 2, **more)
        prepared = Accelerator(cpu=True, dataloader_config=config).prepare(loader)
        assert type(prepared) is DataLoaderDispatcher
        return prepared

    return make


def differing(
    names: Sequence[str], splits: Sequence[bool], scenarios: Sequence[Sequence[Place]], more: Mapping[str, Any]
) -> list[Any]:
    """Loaders, and where they were stopped, whose batches or random numbers were then others on this rank."""
    return [
        (name, split, stops)
        for name in names
        for split in splits
        for stops in _differing(dispatched(name, split, more), scenarios)
    ]


def _differing(make: Callable[[], Any], scenarios: Sequence[Sequence[Place]]) -> list[Any]:
    expected = bare(make, epochs=2)
    count = len(expected[0]) - 1
    assert count >= 4
    return [
        stops
        for stops in scenarios
        if not same(
            through(make, [(epoch, at if at >= 0 else count + 1 + at) for epoch, at in stops], epochs=2), expected
        )
    ]


def differing_in_a_mesh(scenarios: Sequence[Sequence[Place]]) -> list[Any]:
    """With tensor parallelism all ranks get the same batch."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))

    def make() -> Any:
        PartialState(cpu=True)
        return prepare_data_loader(
            DataLoader(Augmented(11), 2, shuffle=True),
            put_on_device=True,
            dispatch_batches=True,
            torch_device_mesh=mesh,
        )

    return _differing(make, scenarios)


def stock(name: str) -> list[Trace]:
    return bare(dispatched(name, False, {}), epochs=2)


def one_start(
    name: str, saved: Sequence[dict[str, Any]] | None, stop: Place | None, seen: Sequence[list[Trace]] | None
) -> tuple[Any, list[Trace]]:
    """From a start of the ranks to a stop: what is saved there, and what was seen so far, by all ranks."""
    rank = dist.get_rank()
    mine: list[Trace] = seen[rank] if seen else [[], [], []]
    left = attempt(dispatched(name, False, {}), saved[rank] if saved else None, stop, mine)
    return left, mine


def from_the_third(name: str) -> tuple[Any, Any]:
    """The samples after two batches of which nothing else is known: of the bare loader, and ours."""
    make = dispatched(name, False, {})
    seed(1)
    expected = list(make())[2:]
    seed(1)
    return _samples(expected), _samples(ResumableLoader(make()).start({"consumed": 2}))


def _samples(batches: Iterable[Any]) -> list[Any]:
    return [(batch.samples if isinstance(batch, Masked) else batch)["index"].tolist() for batch in batches]


def without_a_mark(name: str) -> bool:
    """Left in the step with the first batch: is it all there again?"""
    make = dispatched(name, False, {})
    seed(1)
    expected = list(make())
    seed(1)
    one = ResumableLoader(make()).start()
    next(one)
    return same(list(ResumableLoader(make()).start(one.state())), expected)
