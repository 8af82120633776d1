"""How many samples and tokens the steps of a run have trained on: as the loop says, else as its loaders say."""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

from torch.utils.data import DataLoader, IterableDataset

from reprieve.data.accelerate_loader import is_prepared
from reprieve.errors import ConfigError


class BatchSizes(NamedTuple):
    """Of the batches of one pass over a loader, on one rank. 0: nobody knows."""

    usual: int = 0
    last: int = 0
    batches: int = -1
    """Which one is the last; -1: nobody knows."""

    def of(self, batch: int) -> int:
        """Of the n-th, from 1."""
        return self.last if batch == self.batches else self.usual


class SampleCounter:
    """Of this process since its start, for all ranks."""

    def __init__(self) -> None:
        self.world_size = 1
        self.samples = self.tokens = 0
        self.pending = 0
        """Samples of this rank since the last completed step."""

    def step(self, samples: int | None, tokens: int | None) -> None:
        """A step is completed. What is given is of all ranks; without `samples` each rank has trained on as many as
        this one."""
        self.samples += self.pending * self.world_size if samples is None else _count("samples", samples)
        self.pending = 0
        if tokens is not None:
            self.tokens += _count("tokens", tokens)


def batch_sizes(loader: Any, ranks: int) -> BatchSizes:
    """As far as the loader says it. A batch is not looked into: what its first dimension means only the loop knows."""
    if is_prepared(loader):
        size = getattr(loader, "total_batch_size", None)  # of all ranks; accelerate fills the last one up
        return BatchSizes(size // ranks) if isinstance(size, int) else BatchSizes()
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
