"""What ranks run in the tests of redistribution: many loaders in one start."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DataLoaderConfiguration
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from reprieve.data.resumable_loader import ResumableLoader
from tests.support.data_kit import seed

SAMPLES = 32


class Numbers(Dataset[int]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> int:
        return index


class Stream(IterableDataset[int]):
    """A stream without state_dict. Each worker reads its part."""

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        yield from range(0 if info is None else info.id, SAMPLES, 1 if info is None else info.num_workers)


class Sized(Stream):
    def __len__(self) -> int:
        return SAMPLES


class Knowing(IterableDataset[int]):
    """The same with a state_dict."""

    def __init__(self) -> None:
        self._next: int | None = None

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        self._next = first if self._next is None else self._next
        while self._next < SAMPLES:
            self._next += step
            yield self._next - step
        self._next = None

    def state_dict(self) -> dict[str, Any]:
        return {"next": self._next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._next = state["next"]


class Case(NamedTuple):
    dataset: Any
    options: Mapping[str, Any] = {}
    """Options of the loader."""
    config: Mapping[str, Any] = {}
    """Options of accelerate."""


CASES: Mapping[str, Case] = {
    "map": Case(Numbers),
    "map, workers": Case(Numbers, {"num_workers": 2}),
    "map, drop_last": Case(Numbers, {"drop_last": True}),
    "map, dispatched": Case(Numbers, {}, {"dispatch_batches": True}),
    "map, dispatched, drop_last": Case(Numbers, {"drop_last": True}, {"dispatch_batches": True}),
    "map, split": Case(Numbers, {}, {"split_batches": True}),
    "stream": Case(Stream),
    "stream, sized": Case(Sized),
    "stream, workers": Case(Stream, {"num_workers": 2}),
    "stream, each reads": Case(Stream, {}, {"dispatch_batches": False}),
    "stream, sized, each reads": Case(Sized, {}, {"dispatch_batches": False}),
    "knowing": Case(Knowing),
    "knowing, workers": Case(Knowing, {"num_workers": 2}),
}


class Part(NamedTuple):
    """A part of a pass, on one rank."""

    position: dict[str, Any]
    samples: list[int]
    batches: int
    length: int | None
    """The length that the source reports for a redistributed pass."""


def read_batches(count: int | None, before: Sequence[Mapping[str, Part]] | None, redistribute: bool) -> dict[str, Part]:
    """Read `count` more batches of each case; None: all. `before`: the parts before, by rank."""
    rank = dist.get_rank()
    earlier = before[rank if rank < len(before) else 0] if before else None
    return {name: _part(name, count, earlier[name].position if earlier else None, redistribute) for name in CASES}


def _part(name: str, count: int | None, position: dict[str, Any] | None, redistribute: bool) -> Part:
    dataset, options, config = CASES[name]
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    seed(1 if position is None else 7)
    accelerator = Accelerator(
        cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=3, **config)
    )
    # With split_batches, all ranks share a batch, so its size must be a multiple of their number.
    size = 2 * dist.get_world_size() if config.get("split_batches") else 2
    loader = accelerator.prepare(DataLoader(dataset(), size, shuffle=dataset is Numbers, **options))
    source = ResumableLoader(loader)
    length = None
    if redistribute and position is not None:
        position = source.redistribute(position, 1)
        assert position is not None, name
        length = source.length(position)
    loader_pass = source.start(position)
    found: list[int] = []
    batches = 0
    for batch in loader_pass:
        found += batch.tolist()
        loader_pass.mark()
        batches += 1
        if batches == count:
            break
    state = loader_pass.state()
    loader_pass.close()
    source.end_workers()
    return Part(state, found, batches, length)
