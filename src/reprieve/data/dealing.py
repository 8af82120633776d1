"""The rest of a pass, dealt out in other batches than before: of another size, or to another number of ranks.

Each sample of it is given out once, wherever the batches before had come to. A position says so with `dealt`:

    samples   how many were done when they were dealt out anew; where workers read parts of a stream, of each worker
    at        which number the first of the new batches has

A map-style pass then leaves out the first indices of its sampler, a stream is taken to its own position, or, if it has
none, its first samples are read again and dropped.
"""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from torch.utils.data import BatchSampler, IterableDataset, IterDataPipe, get_worker_info

from reprieve.data.datasets import StandIn
from reprieve.data.replay import read_again

_KEPT = ("start", "iteration", "ended")
_OF_STREAMS = ("dataset", "workers", "last")


class Dealing:
    """How a DataLoader deals out its samples. `stride`: so many of its batches make one for the loop."""

    def __init__(self, loader: Any, stride: int = 1) -> None:
        self._loader = loader
        self._stride = stride
        self._stream = isinstance(loader.dataset, IterableDataset)

    def again(self, position: Mapping[str, Any], multiple: int) -> dict[str, Any] | None:
        """The position in batches of this loader; it was saved in those of another. Its number of batches is a multiple
        of `multiple`. None: it is not known how this one makes its batches, or that one did."""
        size, done = size_of(self._loader), self._done(position)
        if size is None or done is None or behind(self._loader, done) is None:
            return None
        at = sum(done) // (size * self._stride) // multiple * multiple
        kept = (*_KEPT, *_OF_STREAMS) if self._stream else _KEPT
        found = {name: position[name] for name in kept if name in position}
        return {**found, "consumed": at, "dealt": {"samples": done, "at": at}}

    def length(self, position: Mapping[str, Any]) -> int | None:
        """How many batches a pass has that was dealt out anew, those before it counted in. None: that is not known."""
        dealt = position["dealt"]
        try:
            left = self._left_of_stream(dealt) if self._stream else self._left(dealt)
        except TypeError:
            return None  # there is no len()
        return int(dealt["at"]) + self._whole(left, self._stride)

    def _done(self, position: Mapping[str, Any]) -> list[int] | None:
        """The samples that are done, of each worker that reads a stream."""
        workers = self._loader.num_workers if self._stream else 0
        parts = max(workers, 1)
        dealt = position.get("dealt", {"samples": [0] * parts, "at": 0})
        before: list[int] = dealt["samples"] if self._stream else [sum(dealt["samples"])]
        if position["consumed"] == dealt["at"] and len(before) == parts:
            return before
        if position.get("size") is None or len(before) != parts:
            return None
        if self._stream and len(position.get("workers", ())) != workers:
            return None  # others read other parts
        read, size = position["read"], position["size"]
        reads = [read // parts + (worker < read % parts) for worker in range(parts)]
        return [done + size * more for done, more in zip(before, reads, strict=True)]

    def _left(self, dealt: Mapping[str, Any]) -> int:
        """In batches of the loader."""
        changes = behind(self._loader, dealt["samples"])
        assert changes is not None
        return len(changes["batch_sampler"])

    def _left_of_stream(self, dealt: Mapping[str, Any]) -> int:
        dataset, size = self._loader.dataset, size_of(self._loader)
        assert size is not None
        all_of_it = len(dataset.dataset if _is_shard(dataset) else dataset)
        return self._whole(max(all_of_it - sum(dealt["samples"]), 0), size)

    def _whole(self, count: int, size: int) -> int:
        return count // size if self._loader.drop_last else math.ceil(count / size)


def size_of(loader: Any) -> int | None:
    """How many samples a batch of a DataLoader takes off the order of all: its own, and those for other ranks beside
    it. None: not always as many."""
    stream = isinstance(loader.dataset, IterableDataset)
    shard: Any = loader.dataset if stream else loader.batch_sampler
    size: int | None = getattr(loader if stream else shard, "batch_size", None)
    # What is split has its size before that, the loader of a stream that after it.
    if size is None or not _is_shard(shard) or (shard.split_batches and not stream):
        return size
    return size * int(shard.num_processes)


def behind(loader: Any, samples: Sequence[int]) -> dict[str, Any] | None:
    """The attributes of a DataLoader with which its passes begin behind so many samples. None: it is not known how it
    makes its batches."""
    if isinstance(loader.dataset, IterDataPipe):
        return None
    if isinstance(loader.dataset, IterableDataset):
        return {"dataset": _around(loader.dataset, "dataset", lambda inner: _Stream(inner, samples))}
    found = _around(loader.batch_sampler, "batch_sampler", lambda inner: _batches(inner, sum(samples)))
    return None if found is None else {"batch_sampler": found}


def _batches(batches: Any, count: int) -> Any:
    sampler = getattr(batches, "sampler", None)
    # What TRL's sampler repeats belongs together.
    if type(batches).__iter__ is not BatchSampler.__iter__ or sampler is None or hasattr(sampler, "mini_repeat_count"):
        return None
    changed = copy.copy(batches)
    changed.sampler = _Sampler(sampler, count)
    return changed


class _Sampler:
    def __init__(self, sampler: Any, count: int) -> None:
        self._sampler = sampler
        self._count = count

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self._sampler), self._count, None)

    def __len__(self) -> int:
        return max(len(self._sampler) - self._count, 0)


class _Stream(StandIn):
    def __init__(self, dataset: Any, samples: Sequence[int]) -> None:
        super().__init__(dataset)
        object.__setattr__(self, "_reprieve_samples", samples)

    def __iter__(self) -> Iterator[Any]:
        dataset, info = self._reprieve_dataset, get_worker_info()
        items: Iterator[Any] = iter(dataset)
        if info is None:
            read_again(items, self._reprieve_samples[0], f"the dataset {type(dataset).__name__}", "samples")
        else:
            deque(islice(items, self._reprieve_samples[info.id]), maxlen=0)
        return items

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._reprieve_dataset, self._reprieve_samples)


def _is_shard(one: Any) -> bool:
    """Accelerate's, around a batch sampler or a stream: gives out what is for this rank."""
    return {"num_processes", "process_index", "split_batches"} <= getattr(one, "__dict__", {}).keys()


def _around(one: Any, attribute: str, change: Callable[[Any], Any]) -> Any:
    """What is inside of a shard, or itself, changed."""
    if not _is_shard(one):
        return change(one)
    inner = change(getattr(one, attribute))
    if inner is None:
        return None
    changed = copy.copy(one)
    setattr(changed, attribute, inner)
    return changed
