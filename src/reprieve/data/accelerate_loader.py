"""Passes over a loader that accelerate has prepared.

Accelerate's loader holds the real DataLoader as `base_dataloader`, and fetches one batch ahead to know which one is the
last. A pass iterates a copy of it whose `base_dataloader` yields the batches of our own pass over the real one. So
accelerate itself does what it does with batches (device, epochs, gradient state). Such loaders are recognised by their
attributes: accelerate is not imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import chain, repeat
from typing import Any

import torch

from reprieve.data.base import BeforeFirstFetch, Pass
from reprieve.data.positions import LoaderPosition, PassPosition
from reprieve.data.redistribution import SampleRedistribution
from reprieve.data.torch_loader import TorchLoaderSource


def is_prepared(loader: Any) -> bool:
    """Whether accelerate has prepared the loader."""
    return "base_dataloader" in getattr(loader, "__dict__", {})


class AccelerateLoaderSource:
    """Passes over a DataLoaderShard, DataLoaderDispatcher or SkipDataLoader."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.counts_epochs = "iteration" in loader.__dict__
        dispatches = hasattr(type(loader), "_fetch_batches") and loader.state.num_processes > 1
        self.reads = not dispatches or loader.state.process_index == 0
        """Whether this rank reads. A dispatcher reads the batches of all ranks on rank 0, and sends them."""
        self.ranks: int = loader.state.num_processes if dispatches else 1
        # With tensor parallelism all ranks get the same batch.
        shares_batch = dispatches and (loader.split_batches or getattr(loader, "submesh_tp", None))
        self.stride: int = 1 if shares_batch else self.ranks
        """How many batches of the real loader make one of this loader."""
        self.fills_last_batch = dispatches and not loader._drop_last
        """The last batch is filled up with samples of the first."""
        self.redistribution: SampleRedistribution | None = None
        if not loader.__dict__.get("skip_batches"):
            drop_last = dispatches and loader._drop_last
            self.redistribution = SampleRedistribution(
                loader.base_dataloader, self.stride, drop_last=drop_last, dispatched=dispatches
            )
        # The loaders that count epochs are those that fetch ahead.
        self.base = TorchLoaderSource(
            loader.base_dataloader, owner=loader, read_ahead=self.stride if self.counts_epochs else 0
        )

    def start(self, saved: PassPosition | None, before_first_fetch: BeforeFirstFetch | None) -> AccelerateLoaderPass:
        return AccelerateLoaderPass(self, saved, before_first_fetch)

    def position(self) -> LoaderPosition:
        return replace(self.base.position(), iteration=self.loader.iteration if self.counts_epochs else None)

    def restore(self, position: LoaderPosition) -> None:
        self.base.restore(position)
        if position.iteration is not None:
            self.loader.iteration = position.iteration

    def end_workers(self) -> None:
        self.base.end_workers()


class AccelerateLoaderPass(Pass):
    """A pass over accelerate's loader. Inside it, a pass over the real DataLoader has the position, and calls
    `before_first_fetch`."""

    def __init__(
        self,
        source: AccelerateLoaderSource,
        saved: PassPosition | None,
        before_first_fetch: BeforeFirstFetch | None,
    ) -> None:
        super().__init__(saved, None)
        self._source = source
        self._skipped_by_user = int(source.loader.__dict__.get("skip_batches", 0))
        self._done = self._yielded - self._first_batch
        """Consumed batches that the real loader made."""
        # A position of a stock checkpoint has no first samples: then all batches are read again.
        has_first_samples = self._saved.first_samples is not None or not source.fills_last_batch
        self._is_sought = self._done > 0 and has_first_samples
        self._first_samples: list[Any] = list(self._saved.first_samples or ()) if self._is_sought else []
        """The samples that the last batch is filled up with: the beginnings of the first batches of the real loader."""
        self._missing_first_samples = source.ranks
        self._inner = source.base.start(self._inner_position() if saved else None, before_first_fetch)
        self._copy = self._copy_loader()
        self._ended = self._saved.ended
        """The last batch had been yielded at the last mark."""
        self._batches: Iterator[Any] = iter(())

    def _inner_position(self) -> PassPosition:
        """Return the saved position, in batches of the real loader."""
        redistribution = self._redistribution
        return replace(
            self._saved,
            consumed=self._batches_read(self._yielded) if self._is_sought else 0,
            redistribution=redistribution and replace(redistribution, first_batch=0),
        )

    def _copy_loader(self) -> Any:
        """Return a copy of accelerate's loader over our own pass, which skips what that pass does not."""
        loader, source = self._source.loader, self._source
        copy = object.__new__(type(loader))
        copy.__dict__.update(loader.__dict__)
        copy.__dict__["base_dataloader"] = _BaseLoaderProxy(loader.base_dataloader, self._iterate_base)
        if self._is_sought:
            copy.__dict__["skip_batches"] = int(source.fills_last_batch)
        elif self._done:
            copy.__dict__["skip_batches"] = self._done + self._skipped_by_user
        return copy

    def _batches_read(self, yielded: int) -> int:
        """Return how many batches of the real loader these were made of."""
        return (yielded - self._first_batch + self._skipped_by_user) * self._source.stride

    def _begin(self) -> None:
        if self._saved.iteration is not None:
            self._source.loader.iteration = self._copy.iteration = self._saved.iteration
        self._iteration = self._copy.__dict__.get("iteration")
        if self._saved.ended:
            next(self._inner, None)
            if self._source.counts_epochs:
                self._source.loader.iteration = self._copy.iteration + 1
            return
        self._batches = iter(self._copy)

    def _iterate_base(self) -> Iterator[Any]:
        """Iterate the real loader, as accelerate does on this rank."""
        source = self._source
        if not source.reads:
            self._inner.begin_without_reading()
            return iter(())
        if not source.fills_last_batch:
            return self._inner
        if not self._first_samples:
            return self._keeping_first_samples()
        # Accelerate takes them from the first batch, even if it skips that one: only its beginning has to be right.
        first = self._first_samples
        return chain(first, repeat(first[-1], source.stride - len(first)), self._inner)

    def _keeping_first_samples(self) -> Iterator[Any]:
        for number, batch in enumerate(self._inner):
            if number < self._source.stride and self._missing_first_samples > 0:
                self._first_samples.append(_beginning(batch, self._missing_first_samples))
                self._missing_first_samples -= _sample_count(self._first_samples[-1])
            yield batch

    def _fetch(self) -> Any:
        try:
            return next(self._batches)
        except StopIteration:
            self._ended = True
            self._inner.mark()
            if self._source.counts_epochs and not self._saved.ended:
                self._source.loader.iteration = self._copy.iteration
            raise

    def mark(self) -> None:
        self._marked = self._yielded
        # All ranks know this, including those that do not read. What was read beyond the last batch is dropped.
        self._ended |= self._begun and self._source.counts_epochs and self._copy.end_of_dataloader
        self._inner.mark(None if self._ended else self._batches_read(self._yielded))

    def _position(self) -> PassPosition:
        source, position = self._source, self._inner.position()
        # On all ranks as on the one that reads.
        position = replace(position, batches_read=self._batches_read(self._marked))
        if source.ranks > 1:
            position = replace(position, independent_readers=1)
        if source.counts_epochs:
            position = replace(position, iteration=self._iteration, ended=self._ended)
        if source.fills_last_batch:
            position = replace(position, first_samples=self._first_samples)
        return position

    def close(self) -> None:
        super().close()
        self._batches = iter(())
        self._inner.close()


def _beginning(batch: Any, count: int) -> Any:
    """Return the first samples of a batch, in types that a checkpoint can hold. A dispatcher takes only tensors, in
    mappings and lists."""
    if isinstance(batch, torch.Tensor):
        return batch[:count].clone()
    if isinstance(batch, Mapping):
        return {key: _beginning(value, count) for key, value in batch.items()}
    return [_beginning(value, count) for value in batch] if isinstance(batch, list | tuple) else batch


def _sample_count(batch: Any) -> int:
    if isinstance(batch, torch.Tensor):
        return len(batch)
    values = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, list | tuple) else ()
    return max(map(_sample_count, values), default=0)


class _BaseLoaderProxy:
    """Takes the place of the real DataLoader, passes for it, and yields the batches of our pass."""

    def __init__(self, loader: Any, batches: Callable[[], Iterator[Any]]) -> None:
        self._reprieve = loader, batches

    @property
    def __class__(self) -> Any:
        return self._reprieve[0].__class__

    @__class__.setter
    def __class__(self, other: Any) -> None:
        raise TypeError("the class of a DataLoader cannot change during a pass over it")

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "_reprieve")[0], name)

    def __len__(self) -> int:
        return len(self._reprieve[0])

    def __iter__(self) -> Iterator[Any]:
        return self._reprieve[1]()
