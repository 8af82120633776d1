"""Redistribution: the rest of a pass in other batches than before, of another size or for another number of ranks.

Each remaining sample comes once, wherever the earlier batches ended. A redistributed position holds a `Redistribution`:
how many samples are consumed, and the number of the first new batch. To redistribute once more, a position also holds
`batches_read`, `samples_per_batch`, `batches_by_worker` and `independent_readers` (positions.py).

A map-style pass then skips the first indices of its sampler. A stream goes to its own position; if it has none, its
first samples are read again and dropped.
"""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import torch.distributed as dist
from torch.utils.data import BatchSampler, IterableDataset, IterDataPipe, get_worker_info

from reprieve.data.dataset_proxies import DatasetProxy
from reprieve.data.positions import PassPosition, Redistribution
from reprieve.data.replay import replay


class SampleRedistribution:
    """How a DataLoader makes batches of its samples."""

    def __init__(self, loader: Any, stride: int = 1, *, drop_last: bool = False, dispatched: bool = False) -> None:
        """`stride` batches of the loader make one for the training loop; with `drop_last`, an incomplete one is
        dropped. `dispatched`: one rank reads for all."""
        self._loader = loader
        self._stride = stride
        self._drop_last = drop_last
        self._is_stream = isinstance(loader.dataset, IterableDataset)
        self._independent_readers = 1 if dispatched else independent_readers(loader)

    def redistribute(self, position: PassPosition, multiple: int) -> PassPosition | None:
        """Convert a position that was saved with another loader to batches of this one. The number of consumed batches
        is a multiple of `multiple`. Returns None if it is unknown how either loader makes its batches."""
        size, done = samples_per_batch(self._loader), self._consumed_samples(position)
        if size is None or done is None or attributes_after(self._loader, done) is None:
            return None
        converted = PassPosition(
            start_rng=position.start_rng,
            workers_reused=position.workers_reused,
            iteration=position.iteration,
            ended=position.ended,
        )
        if self._is_stream:
            converted = replace(
                converted, dataset=position.dataset, workers=position.workers, last_worker=position.last_worker
            )
        if not done.samples:
            return converted
        consumed = done.samples // (size * self._stride) // multiple * multiple
        return replace(converted, consumed=consumed, redistribution=replace(done, first_batch=consumed))

    def length(self, position: PassPosition) -> int | None:
        """Return the number of batches of a redistributed pass, including the consumed ones. None: unknown."""
        redistribution = position.redistribution
        assert redistribution is not None
        try:
            if self._is_stream:
                remaining = self._remaining_of_stream(redistribution)
            else:
                remaining = self._remaining(redistribution)
        except TypeError:
            return None  # there is no len()
        return redistribution.first_batch + _batch_count(remaining, self._stride, self._drop_last)

    def _consumed_samples(self, position: PassPosition) -> Redistribution | None:
        """Return the consumed samples, of all ranks and, for a stream, of each worker. None: unknown."""
        num_workers = self._loader.num_workers if self._is_stream else 0
        before = position.redistribution or Redistribution()
        samples, parts = before.samples, before.parts if num_workers else None
        if num_workers and parts is None:
            parts = [0] * num_workers
        if parts is not None and len(parts) != num_workers:
            return None  # other workers read other parts
        if position.consumed != before.first_batch:
            size, by_worker = position.samples_per_batch, position.batches_by_worker or ()
            if size is None or position.batches_read is None:
                return None
            if self._is_stream and (
                position.independent_readers != self._independent_readers or len(by_worker) != num_workers
            ):
                return None
            samples += size * position.batches_read
            if parts is not None:
                parts = [part + size * batches for part, batches in zip(parts, by_worker, strict=True)]
        return Redistribution(samples=samples, parts=parts)

    def _remaining(self, redistribution: Redistribution) -> int:
        """Return the number of remaining batches of the DataLoader."""
        changes = attributes_after(self._loader, redistribution)
        assert changes is not None
        return len(changes["batch_sampler"])

    def _remaining_of_stream(self, redistribution: Redistribution) -> int:
        dataset, size = self._loader.dataset, samples_per_batch(self._loader)
        assert size is not None
        samples = len(dataset.dataset if _is_shard(dataset) else dataset) - redistribution.samples
        # At least one: the last batches of workers may have been smaller.
        return max(_batch_count(samples, size, self._loader.drop_last), 1)


def _batch_count(count: int, size: int, drop_last: bool) -> int:
    return count // size if drop_last else math.ceil(count / size)


def independent_readers(loader: Any) -> int:
    """Return how many ranks read a stream independently of each other (for example in shards of `datasets`). 1: all
    ranks share one order."""
    if not isinstance(loader.dataset, IterableDataset) or _is_shard(loader.dataset):
        return 1
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def samples_per_batch(loader: Any) -> int | None:
    """Return how many samples a batch of a DataLoader takes from the common order: its own, and those of the other
    ranks beside it. None: it varies."""
    is_stream = isinstance(loader.dataset, IterableDataset)
    shard: Any = loader.dataset if is_stream else loader.batch_sampler
    size: int | None = getattr(loader if is_stream else shard, "batch_size", None)
    # A split batch sampler has the size before the split, the loader of a stream the size after it.
    if size is None or not _is_shard(shard) or (shard.split_batches and not is_stream):
        return size
    return size * int(shard.num_processes)


def attributes_after(loader: Any, redistribution: Redistribution) -> dict[str, Any] | None:
    """Return attributes for a DataLoader with which its next pass starts after the consumed samples. None: it is
    unknown how the loader makes its batches."""
    if isinstance(loader.dataset, IterDataPipe):
        return None
    if isinstance(loader.dataset, IterableDataset):
        return {"dataset": _SkippingStream(loader.dataset, redistribution)}
    batch_sampler = loader.batch_sampler
    is_shard = _is_shard(batch_sampler)
    inner = _skipping(batch_sampler.batch_sampler if is_shard else batch_sampler, redistribution.samples)
    if inner is None:
        return None
    return {"batch_sampler": _copy_with(batch_sampler, batch_sampler=inner) if is_shard else inner}


def _skipping(batch_sampler: Any, count: int) -> Any:
    """Return a copy of a batch sampler that skips so many samples. None: it is not torch's, or not divisible."""
    sampler = getattr(batch_sampler, "sampler", None)
    if type(batch_sampler).__iter__ is not BatchSampler.__iter__ or sampler is None:
        return None
    if hasattr(sampler, "mini_repeat_count"):  # TRL's sampler repeats samples that belong together
        return None
    return _copy_with(batch_sampler, sampler=_SkippingSampler(sampler, count))


def _copy_with(original: Any, **attributes: Any) -> Any:
    changed = copy.copy(original)
    vars(changed).update(attributes)
    return changed


class _SkippingSampler:
    """A sampler without its first indices."""

    def __init__(self, sampler: Any, count: int) -> None:
        self._sampler = sampler
        self._count = count

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self._sampler), self._count, None)

    def __len__(self) -> int:
        return max(len(self._sampler) - self._count, 0)


class _SkippingStream(DatasetProxy):
    """A stream that skips its first samples once: persistent workers iterate it again, whole, for the next pass."""

    def __init__(self, dataset: Any, redistribution: Redistribution | None) -> None:
        super().__init__(dataset)
        object.__setattr__(self, "_reprieve_redistribution", redistribution)

    def __iter__(self) -> Iterator[Any]:
        dataset, redistribution = self._reprieve_dataset, self._reprieve_redistribution
        object.__setattr__(self, "_reprieve_redistribution", None)
        inner = dataset.dataset if _is_shard(dataset) else dataset
        items: Iterator[Any] = iter(inner)
        if redistribution is not None:
            _skip(items, redistribution, f"the dataset {type(inner).__name__}")
        return iter(_copy_with(dataset, dataset=_OpenStream(inner, items))) if _is_shard(dataset) else items

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._reprieve_dataset, self._reprieve_redistribution)


class _OpenStream(DatasetProxy):
    """A stream that is being iterated already. A shard would begin to iterate only with its first sample."""

    def __init__(self, dataset: Any, items: Iterator[Any]) -> None:
        super().__init__(dataset)
        object.__setattr__(self, "_reprieve_items", items)

    def __iter__(self) -> Iterator[Any]:
        items: Iterator[Any] = self._reprieve_items
        return items


def _skip(items: Iterator[Any], redistribution: Redistribution, what: str) -> None:
    info, count = get_worker_info(), redistribution.samples
    if info is None:
        replay(items, count, what, unit="samples")
        return
    parts: Sequence[int] = redistribution.parts or ()
    if len(parts) != info.num_workers:
        parts = [count // info.num_workers + (worker < count % info.num_workers) for worker in range(info.num_workers)]
    deque(islice(items, parts[info.id]), maxlen=0)


def _is_shard(candidate: Any) -> bool:
    """Whether it is accelerate's wrapper around a batch sampler or a stream, which selects what is for this rank."""
    return {"num_processes", "process_index", "split_batches"} <= getattr(candidate, "__dict__", {}).keys()
