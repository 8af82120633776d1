"""A torch DataLoader as a source of passes (torch_pass.py).

A pass does not iterate the user's loader but a copy with some attributes replaced: the sampler (resumable_sampler.py),
and with workers `collate_fn` and `worker_init_fn` (workers/state.py). The copy's batches, and all that it draws from
generators, are those of the original. The source keeps what outlives a pass: persistent workers, and the loader's own
generators.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.process import BaseProcess
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, IterDataPipe

from reprieve.data.base import BeforeFirstFetch
from reprieve.data.dataset_proxies import IterableCursor, PlaceholderDataset, TrackedIterable, is_stateful
from reprieve.data.hf_streams import is_stream
from reprieve.data.loader_rng import LoaderRng
from reprieve.data.positions import DatasetPosition, LoaderPosition, PassPosition, Redistribution, WorkerPosition
from reprieve.data.redistribution import SampleRedistribution, attributes_after
from reprieve.data.resumable_sampler import ResumableSampler, SkipPlan
from reprieve.data.torch_pass import TorchLoaderPass
from reprieve.data.workers.processes import end_processes, track_children
from reprieve.data.workers.state import ReportingCollate, WorkerInit, WorkerStates

log = logging.getLogger("reprieve")


def is_plain_loader(loader: Any) -> bool:
    """Whether it iterates as a DataLoader does. A subclass with its own `__iter__` would not understand what our
    workers send."""
    return isinstance(loader, DataLoader) and type(loader).__iter__ is DataLoader.__iter__


class TorchLoaderSource:
    """Passes over one DataLoader."""

    def __init__(self, loader: Any, *, owner: Any = None, read_ahead: int = 0) -> None:
        """`owner`: accelerate's loader around this one, which may hold more generators. It fetches `read_ahead` batches
        before it yields the one before them."""
        self.loader = loader
        self.rng = LoaderRng(loader if owner is None else owner)
        self.read_ahead = read_ahead
        self.num_workers: int = loader.num_workers
        self.is_persistent: bool = self.num_workers > 0 and loader.persistent_workers
        self.is_iterable = isinstance(loader.dataset, IterableDataset)
        self.redistribution: SampleRedistribution | None = SampleRedistribution(loader)
        self.sampler = ResumableSampler()
        self.cursor = IterableCursor()
        self.rng_before_workers: Mapping[str, Any] | None = None
        """The random number generators before the persistent workers were made."""
        self.workers = WorkerStates(self.num_workers)
        self.restored_rng: Mapping[str, Any] | None = None
        """The loader's own generators in the interrupted process."""
        self._iterator: Any = None
        """Torch's iterator, which holds persistent workers."""
        self._children: weakref.WeakSet[BaseProcess] = weakref.WeakSet()
        self._passes: weakref.WeakSet[TorchLoaderPass] = weakref.WeakSet()
        if self.num_workers and not getattr(loader, "in_order", True):
            log.warning("a DataLoader with in_order=False yields its batches in no fixed order: a resume is not exact")

    @property
    def _dataset_has_state(self) -> bool:
        """Whether the dataset remembers something between two passes in this process."""
        dataset = self.loader.dataset
        return not self.num_workers and is_stateful(dataset) and not is_stream(dataset)

    @property
    def has_persistent_workers(self) -> bool:
        """Whether persistent workers are running."""
        return self._iterator is not None

    def start(self, saved: PassPosition | None, before_first_fetch: BeforeFirstFetch | None) -> TorchLoaderPass:
        new_pass = TorchLoaderPass(self, saved, before_first_fetch)
        self._passes.add(new_pass)
        return new_pass

    def position(self) -> LoaderPosition:
        has_made_workers = self.is_persistent and self.rng_before_workers is not None
        return LoaderPosition(
            **self.rng.capture_own(),
            rng_before_workers=self.rng_before_workers if has_made_workers else None,
            workers=self.workers.positions() if has_made_workers else None,
            dataset=self.loader.dataset.state_dict() if self._dataset_has_state else None,
        )

    def restore(self, position: LoaderPosition) -> None:
        self.drop_persistent_workers()
        self.restored_rng = position.own_rng
        self.rng.restore_own(position.own_rng)
        self.rng_before_workers = position.rng_before_workers
        self.workers = WorkerStates(self.num_workers, self.check_worker_count(position.workers))
        if position.dataset is not None and self._dataset_has_state:
            self.loader.dataset.load_state_dict(position.dataset)

    def check_worker_count(self, positions: Sequence[WorkerPosition] | None) -> Sequence[WorkerPosition]:
        """Return the positions, or none and log a warning if they belong to another number of workers."""
        if positions is not None and len(positions) != self.num_workers:
            log.warning(
                "the run had %d DataLoader workers and has %d now: random numbers drawn in workers differ",
                len(positions),
                self.num_workers,
            )
            return ()
        return positions or ()

    def iterate(
        self,
        plan: SkipPlan,
        workers: Sequence[WorkerPosition],
        position: DatasetPosition | None,
        redistribution: Redistribution | None,
    ) -> Iterator[Any]:
        """Return a new iterator of torch's, over a copy of the loader as it is now. It starts after the samples of
        `redistribution`."""
        loader = self.loader
        if redistribution is not None:
            after = attributes_after(loader, redistribution)
            assert after is not None
            loader = _copy_with(loader, after)
        has_batches = loader.batch_sampler is not None
        self.sampler.inner = loader.batch_sampler if has_batches else loader.sampler
        self.sampler.plan = plan
        changes = {"batch_sampler" if has_batches else "sampler": self.sampler, "_iterator": self._iterator}
        cursor = None
        if self.is_iterable and not isinstance(loader.dataset, IterDataPipe):
            cursor = self.cursor
            cursor.resume_at(position, None)
            changes["dataset"] = TrackedIterable(loader.dataset, cursor)
        elif plan.placeholders:
            changes["dataset"] = PlaceholderDataset(loader.dataset)
        if not self.num_workers:
            return iter(_copy_with(loader, changes))
        collate = ReportingCollate(loader.collate_fn, cursor)
        changes["collate_fn"] = collate
        changes["worker_init_fn"] = WorkerInit(
            loader.worker_init_fn, collate, cursor, positions=workers, placeholders=plan.placeholders
        )
        copy = _copy_with(loader, changes)
        with track_children(self._children):
            iterator: Iterator[Any] = iter(copy)
        self._iterator = copy._iterator
        return iterator

    def drop_persistent_workers(self) -> None:
        """End persistent workers, if there are any: the next pass makes new ones."""
        if self._iterator is not None:
            self.end_workers()

    def end_workers(self) -> None:
        end_processes(list(self._children), self._release_iterators)
        self._release_iterators()

    def _release_iterators(self) -> None:
        # Torch asks its workers to exit when nothing holds the iterator any more.
        self._iterator = None
        for open_pass in list(self._passes):
            open_pass.close()


def _copy_with(loader: Any, changes: Mapping[str, Any]) -> Any:
    """Return a copy of a loader with other attributes. (copy.copy would use what a subclass defines for pickling.)"""
    copy = object.__new__(type(loader))
    copy.__dict__.update(loader.__dict__)
    copy.__dict__.update(changes)
    return copy
