"""Passes over a loader that accelerate has prepared.

It holds the real DataLoader as `base_dataloader`, and fetches one batch ahead to know which one is the last. A pass
iterates a copy of it whose `base_dataloader` gives our own pass over the real one: what accelerate does with batches
(device, epochs, gradient state) is done by accelerate. Recognised by its attributes: accelerate is not imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import chain, repeat
from typing import Any

import torch

from reprieve.data.base import Enter, Pass
from reprieve.data.redistribution import SampleRedistribution
from reprieve.data.torch_loader import TorchLoaderPass, TorchLoaderSource


def is_prepared(loader: Any) -> bool:
    return "base_dataloader" in getattr(loader, "__dict__", {})


class AccelerateLoaderSource:
    """One DataLoaderShard, DataLoaderDispatcher or SkipDataLoader."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.counts_epochs = "iteration" in loader.__dict__
        several = hasattr(type(loader), "_fetch_batches") and loader.state.num_processes > 1
        self.reads = not several or loader.state.process_index == 0
        """A dispatcher reads the batches of all ranks on rank 0, and sends them."""
        self.ranks: int = loader.state.num_processes if several else 1
        # With tensor parallelism all ranks have the same batch.
        one = several and (loader.split_batches or getattr(loader, "submesh_tp", None))
        self.stride: int = 1 if one else self.ranks
        """Batches of the real loader in one of this."""
        self.wraps = several and not loader._drop_last
        """The last batch is filled up with samples of the first."""
        self.dealing: SampleRedistribution | None = None
        if not loader.__dict__.get("skip_batches"):
            drop_last = several and loader._drop_last
            self.dealing = SampleRedistribution(
                loader.base_dataloader, self.stride, drop_last=drop_last, dispatched=several
            )
        # Those that count epochs are those that fetch ahead.
        self.base = TorchLoaderSource(
            loader.base_dataloader, owner=loader, ahead=self.stride if self.counts_epochs else 0
        )

    def start(self, saved: Mapping[str, Any] | None, enter: Enter | None) -> AccelerateLoaderPass:
        return AccelerateLoaderPass(self, saved, enter)

    def state(self) -> dict[str, Any]:
        state = self.base.state()
        if self.counts_epochs:
            state["iteration"] = self.loader.iteration
        return state

    def restore(self, state: Mapping[str, Any]) -> None:
        self.base.restore(state)
        if "iteration" in state:
            self.loader.iteration = state["iteration"]

    def end_workers(self) -> None:
        self.base.end_workers()


class AccelerateLoaderPass(Pass):
    """One pass over it. The pass over the real DataLoader has the position, and calls `enter`."""

    def __init__(self, source: AccelerateLoaderSource, saved: Mapping[str, Any] | None, enter: Enter | None) -> None:
        super().__init__(saved, None)
        self._source = source
        loader = source.loader
        self._skipped = int(loader.__dict__.get("skip_batches", 0))
        # A position of a stock checkpoint has no first samples: all is read again.
        since = self._yielded - self._at
        sought = since > 0 and ("first" in self._saved or not source.wraps)
        self._first: list[Any] = list(self._saved["first"]) if sought and source.wraps else []
        """The samples that the last batch is filled up with: from the beginning of batches of the real loader."""
        self._missing = source.ranks
        """How many more of them there will be."""
        inner = dict(saved) if saved else None
        if inner is not None:
            inner["consumed"] = self._read(self._yielded) if sought else 0
            if self._dealt is not None:
                inner["dealt"] = {**self._dealt, "at": 0}
        self._inner: TorchLoaderPass = source.base.start(inner, enter)
        self._copy = object.__new__(type(loader))
        self._copy.__dict__.update(loader.__dict__)
        self._copy.__dict__["base_dataloader"] = _Base(loader.base_dataloader, self._batches_of_base)
        if since:
            self._copy.__dict__["skip_batches"] = int(source.wraps) if sought else since + self._skipped
        self._ended = bool(self._saved.get("ended"))
        """The last batch was given out at the last mark."""
        self._batches: Iterator[Any] = iter(())

    def _read(self, yielded: int) -> int:
        """How many batches of the real loader these were made of."""
        return (yielded - self._at + self._skipped) * self._source.stride

    def _begin(self) -> None:
        if "iteration" in self._saved:
            self._source.loader.iteration = self._copy.iteration = self._saved["iteration"]
        self._iteration = self._copy.__dict__.get("iteration")
        if self._saved.get("ended"):
            next(self._inner, None)
            if self._source.counts_epochs:
                self._source.loader.iteration = self._copy.iteration + 1
            return
        self._batches = iter(self._copy)

    def _batches_of_base(self) -> Iterator[Any]:
        source = self._source
        if not source.reads:
            self._inner.begin_unread()
            return iter(())
        if not source.wraps:
            return self._inner
        if not self._first:
            return self._noting_first()
        # It takes them from the first batch, also where that one is skipped: only its beginning has to be right.
        return chain(self._first, repeat(self._first[-1], source.stride - len(self._first)), self._inner)

    def _noting_first(self) -> Iterator[Any]:
        for number, batch in enumerate(self._inner):
            if number < self._source.stride and self._missing > 0:
                self._first.append(_beginning(batch, self._missing))
                self._missing -= _size(self._first[-1])
            yield batch

    def _fetch(self) -> Any:
        try:
            return next(self._batches)
        except StopIteration:
            self._ended = True
            self._inner.mark()
            if self._source.counts_epochs and not self._saved.get("ended"):
                self._source.loader.iteration = self._copy.iteration
            raise

    def mark(self) -> None:
        self._marked = self._yielded
        # Known on all ranks, also on those that do not read. What was read beyond the last batch is dropped.
        self._ended |= self._begun and self._source.counts_epochs and self._copy.end_of_dataloader
        self._inner.mark(None if self._ended else self._read(self._yielded))

    def _state(self) -> dict[str, Any]:
        state = self._inner.state()
        del state["consumed"]
        state["read"] = self._read(self._marked)  # by the rank that reads
        if self._source.ranks > 1:
            state["apart"] = 1
        if self._source.counts_epochs:
            state["iteration"] = self._iteration
            state["ended"] = self._ended
        if self._source.wraps:
            state["first"] = self._first
        return state

    def close(self) -> None:
        super().close()
        self._batches = iter(())
        self._inner.close()


def _beginning(batch: Any, count: int) -> Any:
    """The first samples, in types that a checkpoint holds. A dispatcher takes only tensors, in mappings and lists."""
    if isinstance(batch, torch.Tensor):
        return batch[:count].clone()
    if isinstance(batch, Mapping):
        return {key: _beginning(value, count) for key, value in batch.items()}
    return [_beginning(value, count) for value in batch] if isinstance(batch, list | tuple) else batch


def _size(batch: Any) -> int:
    if isinstance(batch, torch.Tensor):
        return len(batch)
    values = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, list | tuple) else ()
    return max(map(_size, values), default=0)


class _Base:
    """In place of the real DataLoader: is taken for it, and gives the batches of our pass."""

    def __init__(self, loader: Any, batches: Callable[[], Iterator[Any]]) -> None:
        self._reprieve = loader, batches

    @property
    def __class__(self) -> Any:
        return self._reprieve[0].__class__

    @__class__.setter
    def __class__(self, other: Any) -> None:
        raise TypeError("not while a pass is running")

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "_reprieve")[0], name)

    def __len__(self) -> int:
        return len(self._reprieve[0])

    def __iter__(self) -> Iterator[Any]:
        return self._reprieve[1]()
