"""Counts the samples and tokens that a run has trained on: as given to `step`, else by the batch sizes of loaders."""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

from torch.utils.data import DataLoader, IterableDataset

from reprieve.data.accelerate_loader import is_prepared
from reprieve.errors import ConfigError


class BatchSizes(NamedTuple):
    """The sizes of the batches of one pass over a loader, on one rank. 0: unknown."""

    usual: int = 0
    last: int = 0
    batches: int = -1
    """The number of the last batch; -1: unknown."""

    def of(self, batch: int) -> int:
        """Return the size of the n-th batch, from 1."""
        return self.last if batch == self.batches else self.usual


class SampleCounter:
    """The samples and tokens of all ranks since the start of this process."""

    def __init__(self) -> None:
        self.world_size = 1
        self.samples = self.tokens = 0
        self.pending = 0
        """Samples of this rank since the last completed step."""

    def step(self, samples: int | None, tokens: int | None) -> None:
        """Count a completed step. Given numbers are totals of all ranks; without `samples`, assume that each rank has
        trained on as many as this one."""
        self.samples += self.pending * self.world_size if samples is None else _count("samples", samples)
        self.pending = 0
        if tokens is not None:
            self.tokens += _count("tokens", tokens)


def batch_sizes(loader: Any, world_size: int) -> BatchSizes:
    """Return the sizes as far as the loader declares them. Batches are not inspected: only the loop knows what their
    first dimension means."""
    if is_prepared(loader):
        size = getattr(loader, "total_batch_size", None)  # of all ranks; accelerate fills up the last batch
        return BatchSizes(size // world_size) if isinstance(size, int) else BatchSizes()
    if not isinstance(loader, DataLoader) or not isinstance(size := loader.batch_size, int):
        return BatchSizes()
    try:
        if isinstance(loader.dataset, IterableDataset) or loader.drop_last:
            return BatchSizes(size)
        batches, samples = len(loader), len(loader.sampler)  # type: ignore[arg-type]
    except TypeError:  # a sampler without a length
        return BatchSizes(size)
    return BatchSizes(size, samples - size * (batches - 1), batches)


def _count(name: str, value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise ConfigError(f"{name} is {type(value).__name__} and not a whole number") from None
