"""What ranks run in the tests of accelerate's dispatcher: many loaders in one process, to start ranks only once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.data_loader import DataLoaderDispatcher, prepare_data_loader
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DataLoaderConfiguration
from datasets import Dataset, interleave_datasets
from datasets.distributed import split_dataset_by_node
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, default_collate

from reprieve.data.resumable_loader import ResumableLoader
from tests.support.data_kit import Augmented, Shards, Trace, Unaware, bare, draw, read_attempt, same, seed, through

StopPoint = tuple[int, int]
"""An epoch, and how many of its batches are consumed: -1 means all, -2 all but the last."""


class Masked(NamedTuple):
    """A batch that `torch.load(weights_only=True)` does not load."""

    samples: dict[str, Any]
    mask: torch.Tensor


class Masks:
    """A collator that draws random numbers, for batches that can be joined and split."""

    def __call__(self, samples: Any) -> Any:
        return Masked(default_collate(samples), torch.tensor([draw() for _ in samples]))


class Drawing(Shards):
    """A stream that draws once more at its end, as for the order of the next epoch."""

    def __iter__(self) -> Any:
        yield from super().__iter__()
        draw()


def rows(count: int) -> Any:
    return Dataset.from_dict({"index": list(range(count))}).to_iterable_dataset(num_shards=4)


def doubled(row: dict[str, int]) -> dict[str, int]:
    return {"index": 2 * row["index"]}


LOADERS: Mapping[str, Callable[..., DataLoader[Any]]] = {
    # One sample beyond the full batches: the last batch is filled up, and made of fewer batches of the real loader.
    "map": lambda ranks, **more: DataLoader(Augmented(8 * ranks + 1), shuffle=True, collate_fn=Masks(), **more),
    "map, full": lambda ranks, **more: DataLoader(Augmented(8 * ranks), shuffle=True, **more),
    # One batch and a sample too many: they are read and dropped.
    "map, drop_last": lambda ranks, **more: DataLoader(Augmented(8 * ranks + 3), shuffle=True, drop_last=True, **more),
    "stream": lambda ranks, **more: DataLoader(Shards(8 * ranks + 1), collate_fn=Masks(), **more),
    "stream, drop_last": lambda ranks, **more: DataLoader(Shards(8 * ranks + 3), drop_last=True, **more),
    # One batch too many: while it waits for the others of its round, the stream ends.
    "stream, drawing": lambda ranks, **more: DataLoader(Drawing(8 * ranks + 2), **more),
    "stream that cannot tell": lambda ranks, **more: DataLoader(Unaware(), **more),
    "stream of datasets": lambda ranks, **more: DataLoader(rows(8 * ranks + 1), collate_fn=Masks(), **more),
    "stream of datasets, shuffled": lambda ranks, **more: DataLoader(
        rows(8 * ranks + 1).shuffle(seed=5, buffer_size=5), collate_fn=Masks(), **more
    ),
    "stream of datasets, interleaved": lambda ranks, **more: DataLoader(
        interleave_datasets([rows(4 * ranks), rows(4 * ranks + 1).map(doubled)]), collate_fn=Masks(), **more
    ),
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
            draw()  # each rank has other random numbers
        loader = LOADERS[name](ranks, batch_size=2 * ranks if split else 2, **more)
        prepared = Accelerator(cpu=True, dataloader_config=config).prepare(loader)
        assert type(prepared) is DataLoaderDispatcher
        return prepared

    return make


def differing(
    names: Sequence[str], splits: Sequence[bool], scenarios: Sequence[Sequence[StopPoint]], more: Mapping[str, Any]
) -> list[Any]:
    """Return the loaders and stops after which batches or random numbers differed on this rank."""
    return [
        (name, split, stops)
        for name in names
        for split in splits
        for stops in _differing(dispatched(name, split, more), scenarios)
    ]


def _differing(make: Callable[[], Any], scenarios: Sequence[Sequence[StopPoint]]) -> list[Any]:
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


def differing_in_a_mesh(scenarios: Sequence[Sequence[StopPoint]]) -> list[Any]:
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
    name: str, saved: Sequence[dict[str, Any]] | None, stop: StopPoint | None, seen: Sequence[list[Trace]] | None
) -> tuple[Any, list[Trace]]:
    """Run from a start of the ranks to a stop. Returns what is saved there, and what this rank has seen so far."""
    rank = dist.get_rank()
    own_seen: list[Trace] = seen[rank] if seen else [[], [], []]
    stopped = read_attempt(dispatched(name, False, {}), saved[rank] if saved else None, stop, own_seen)
    return stopped, own_seen


def from_the_third(name: str) -> tuple[Any, Any]:
    """Return the samples after two batches: of the bare loader, and of a resume that knows only their number."""
    make = dispatched(name, False, {})
    seed(1)
    expected = list(make())[2:]
    seed(1)
    return _samples(expected), _samples(ResumableLoader(make()).start({"consumed": 2}))


def differing_in_own_parts(scenarios: Sequence[Sequence[StopPoint]], more: Mapping[str, Any]) -> list[Any]:
    """Each rank reads its own part of a stream of `datasets`: shards where they divide evenly, otherwise rows."""
    found = []
    for shards, shuffled in ((4, False), (4, True), (3, False)):

        def make(shards: int = shards, shuffled: bool = shuffled) -> Any:
            data = Dataset.from_dict({"index": list(range(24))}).to_iterable_dataset(num_shards=shards)
            if shuffled:
                data = data.shuffle(seed=5, buffer_size=5)
            part = split_dataset_by_node(data, rank=dist.get_rank(), world_size=dist.get_world_size())
            return DataLoader(part, batch_size=2, collate_fn=Masks(), **more)

        found += [(shards, shuffled, stops) for stops in _differing(make, scenarios)]
    return found


def _samples(batches: Iterable[Any]) -> list[Any]:
    return [(batch.samples if isinstance(batch, Masked) else batch)["index"].tolist() for batch in batches]


def without_a_mark(name: str) -> bool:
    """Whether a pass that is stopped in its first step yields everything again."""
    make = dispatched(name, False, {})
    seed(1)
    expected = list(make())
    seed(1)
    loader_pass = ResumableLoader(make()).start()
    next(loader_pass)
    return same(list(ResumableLoader(make()).start(loader_pass.state())), expected)
