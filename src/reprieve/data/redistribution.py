"""The rest of a pass, dealt out in other batches than before: of another size, or to another number of ranks.

Each sample of it is given out once, wherever the batches before had come to. A position says so with `dealt`:

    samples   how many were done, by all ranks together, when they were dealt out anew
    parts     the same of each worker, where workers read parts of a stream
    at        which number the first of the new batches has

and, so that it can be dealt out again: `read`, the batches of the DataLoader since then, `size`, what each of them took
off the order of all, `given`, how many each worker made, and `apart`, how many ranks read a stream each in its own way.

A map-style pass then leaves out the first indices of its sampler, a stream is taken to its own position, or, if it has
none, its first samples are read again and dropped.
"""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import torch.distributed as dist
from torch.utils.data import BatchSampler, IterableDataset, IterDataPipe, get_worker_info

from reprieve.data.dataset_proxies import DatasetProxy
from reprieve.data.replay import read_again

_KEPT = ("start", "reused", "iteration", "ended")
_OF_STREAMS = ("dataset", "workers", "last")


class SampleRedistribution:
    """How a DataLoader deals out its samples. `stride`: so many of its batches make one for the loop; `drop_last`: if
    there are as many. `dispatched`: one rank reads for all."""

    def __init__(self, loader: Any, stride: int = 1, *, drop_last: bool = False, dispatched: bool = False) -> None:
        self._loader = loader
        self._stride = stride
        self._drop_last = drop_last
        self._stream = isinstance(loader.dataset, IterableDataset)
        self._apart = 1 if dispatched else apart(loader)

    def again(self, position: Mapping[str, Any], multiple: int) -> dict[str, Any] | None:
        """The position in batches of this loader; it was saved in those of another. Its number of batches is a multiple
        of `multiple`. None: it is not known how this one makes its batches, or that one did."""
        size, done = size_of(self._loader), self._done(position)
        if size is None or done is None or behind(self._loader, done) is None:
            return None
        kept = (*_KEPT, *_OF_STREAMS) if self._stream else _KEPT
        found = {name: position[name] for name in kept if name in position}
        if not done["samples"]:
            return {**found, "consumed": 0}
        at = done["samples"] // (size * self._stride) // multiple * multiple
        return {**found, "consumed": at, "dealt": {**done, "at": at}}

    def length(self, position: Mapping[str, Any]) -> int | None:
        """How many batches a pass has that was dealt out anew, those before it counted in. None: that is not known."""
        dealt = position["dealt"]
        try:
            left = self._left_of_stream(dealt) if self._stream else self._left(dealt)
        except TypeError:
            return None  # there is no len()
        return int(dealt["at"]) + _whole(left, self._stride, self._drop_last)

    def _done(self, position: Mapping[str, Any]) -> dict[str, Any] | None:
        """The samples that are done."""
        workers = self._loader.num_workers if self._stream else 0
        before = position.get("dealt", {"samples": 0, "at": 0})
        parts: Sequence[int] = before.get("parts", [0] * workers) if workers else ()
        if len(parts) != workers:
            return None  # others read other parts
        if position["consumed"] != before["at"]:
            size, given = position.get("size"), position.get("given", ())
            if size is None or (self._stream and (position["apart"] != self._apart or len(given) != workers)):
                return None
            parts = [done + size * more for done, more in zip(parts, given, strict=True)] if workers else ()
            before = {"samples": before["samples"] + size * position["read"]}
        return {"samples": before["samples"], **({"parts": parts} if workers else {})}

    def _left(self, dealt: Mapping[str, Any]) -> int:
        """In batches of the loader."""
        changes = behind(self._loader, dealt)
        assert changes is not None
        return len(changes["batch_sampler"])

    def _left_of_stream(self, dealt: Mapping[str, Any]) -> int:
        dataset, size = self._loader.dataset, size_of(self._loader)
        assert size is not None
        left = len(dataset.dataset if _is_shard(dataset) else dataset) - dealt["samples"]
        return max(_whole(left, size, self._loader.drop_last), 1)  # the last ones of workers may have been smaller


def _whole(count: int, size: int, drop_last: bool) -> int:
    return count // size if drop_last else math.ceil(count / size)


def apart(loader: Any) -> int:
    """How many ranks read a stream each in its own way, say in shards of `datasets`. One: they share one order."""
    if not isinstance(loader.dataset, IterableDataset) or _is_shard(loader.dataset):
        return 1
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


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


def behind(loader: Any, dealt: Mapping[str, Any]) -> dict[str, Any] | None:
    """The attributes of a DataLoader with which its next pass begins behind so many samples. None: it is not known how
    it makes its batches."""
    if isinstance(loader.dataset, IterDataPipe):
        return None
    if isinstance(loader.dataset, IterableDataset):
        return {"dataset": _Stream(loader.dataset, dealt)}
    batches = loader.batch_sampler
    shard = _is_shard(batches)
    found = _batches(batches.batch_sampler if shard else batches, dealt["samples"])
    if found is None:
        return None
    return {"batch_sampler": _with(batches, batch_sampler=found) if shard else found}


def _batches(batches: Any, count: int) -> Any:
    sampler = getattr(batches, "sampler", None)
    # What TRL's sampler repeats belongs together.
    if type(batches).__iter__ is not BatchSampler.__iter__ or sampler is None or hasattr(sampler, "mini_repeat_count"):
        return None
    return _with(batches, sampler=_Sampler(sampler, count))


def _with(one: Any, **attributes: Any) -> Any:
    changed = copy.copy(one)
    vars(changed).update(attributes)
    return changed


class _Sampler:
    def __init__(self, sampler: Any, count: int) -> None:
        self._sampler = sampler
        self._count = count

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self._sampler), self._count, None)

    def __len__(self) -> int:
        return max(len(self._sampler) - self._count, 0)


class _Stream(DatasetProxy):
    """Once: persistent workers iterate it again for the next pass."""

    def __init__(self, dataset: Any, dealt: Mapping[str, Any]) -> None:
        super().__init__(dataset)
        object.__setattr__(self, "_reprieve_dealt", dealt)

    def __iter__(self) -> Iterator[Any]:
        dataset, dealt = self._reprieve_dataset, self._reprieve_dealt
        object.__setattr__(self, "_reprieve_dealt", None)
        inner = dataset.dataset if _is_shard(dataset) else dataset
        items: Iterator[Any] = iter(inner)
        if dealt is not None:
            _leave_out(items, dealt, f"the dataset {type(inner).__name__}")
        return iter(_with(dataset, dataset=_Rest(inner, items))) if _is_shard(dataset) else items

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._reprieve_dataset, self._reprieve_dealt)


class _Rest(DatasetProxy):
    """What a shard finds inside: it begins to iterate only when it is asked for its first sample."""

    def __init__(self, dataset: Any, items: Iterator[Any]) -> None:
        super().__init__(dataset)
        object.__setattr__(self, "_reprieve_items", items)

    def __iter__(self) -> Iterator[Any]:
        items: Iterator[Any] = self._reprieve_items
        return items


def _leave_out(items: Iterator[Any], dealt: Mapping[str, Any], what: str) -> None:
    info, count = get_worker_info(), dealt["samples"]
    if info is None:
        read_again(items, count, what, unit="samples")
        return
    parts = dealt.get("parts", ())
    if len(parts) != info.num_workers:
        parts = [count // info.num_workers + (worker < count % info.num_workers) for worker in range(info.num_workers)]
    deque(islice(items, parts[info.id]), maxlen=0)


def _is_shard(one: Any) -> bool:
    """Accelerate's, around a batch sampler or a stream: gives out what is for this rank."""
    return {"num_processes", "process_index", "split_batches"} <= getattr(one, "__dict__", {}).keys()
