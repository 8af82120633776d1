"""Passes over a torch DataLoader.

Not the user's loader is iterated but a copy of it with some attributes exchanged: the sampler (sampling.py), and with
workers `collate_fn` and `worker_init_fn` (workers.py). Its batches, and all that it draws from generators, are those
of the original.

A resumed pass sets the random numbers to what they were when the pass started, makes the iterator (torch draws the
workers' seed there), passes over the indices that are consumed, puts the workers to where they were, and then sets the
random numbers to where the run is. Persistent workers outlive a pass: their seed comes from the pass that made them.
"""

from __future__ import annotations

import logging
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from multiprocessing.process import BaseProcess
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, IterDataPipe

from reprieve.data.base import Enter, Pass
from reprieve.data.dataset_proxies import (
    IterableCursor,
    PlaceholderDataset,
    PositionError,
    TrackedIterable,
    is_stateful,
)
from reprieve.data.hf_streams import is_stream, why_inexact
from reprieve.data.loader_rng import LoaderRng, restore_global
from reprieve.data.redistribution import SampleRedistribution, apart, behind, size_of
from reprieve.data.replay import NO_STATE, read_again
from reprieve.data.resumable_sampler import ResumableSampler, SkipPlan
from reprieve.data.worker_processes import end, noted
from reprieve.data.worker_state import Collate, Shipped, Start, WorkerStates
from reprieve.rng import RngSnapshot, capture_rng, snapshot_rng

log = logging.getLogger("reprieve")

_KEPT = 256
"""Fetches between two marks for which is kept what was before: 15 kB each."""


def is_plain_loader(loader: Any) -> bool:
    """A subclass that iterates in its own way would not understand what our workers send."""
    return isinstance(loader, DataLoader) and type(loader).__iter__ is DataLoader.__iter__


class TorchLoaderSource:
    """One DataLoader. `owner` is the loader that holds it and may hold more generators; that one fetches so many
    batches `ahead` before it gives out the one before (accelerate)."""

    def __init__(self, loader: Any, *, owner: Any = None, ahead: int = 0) -> None:
        self.loader = loader
        self.rng = LoaderRng(loader if owner is None else owner)
        self.ahead = ahead
        self.count: int = loader.num_workers
        self.persistent: bool = self.count > 0 and loader.persistent_workers
        self.iterable = isinstance(loader.dataset, IterableDataset)
        self.dealing: SampleRedistribution | None = SampleRedistribution(loader)
        self.indices = ResumableSampler()
        self.items = IterableCursor()
        self.made: Mapping[str, Any] | None = None
        """The random numbers before the persistent workers were made."""
        self.workers = WorkerStates(self.count)
        self.own: Mapping[str, Any] | None = None
        """The loader's generators as the interrupted process had them."""
        self._iterator: Any = None
        self._children: weakref.WeakSet[BaseProcess] = weakref.WeakSet()
        self._passes: weakref.WeakSet[TorchLoaderPass] = weakref.WeakSet()
        if self.count and not getattr(loader, "in_order", True):
            log.warning("a DataLoader with in_order=False gives its batches in no fixed order: a resume is not exact")

    @property
    def _dataset_remembers(self) -> bool:
        """Between two passes in this process."""
        dataset = self.loader.dataset
        return not self.count and is_stateful(dataset) and not is_stream(dataset)

    @property
    def alive(self) -> bool:
        """Persistent workers are there."""
        return self._iterator is not None

    def start(self, saved: Mapping[str, Any] | None, enter: Enter | None) -> TorchLoaderPass:
        one = TorchLoaderPass(self, saved, enter)
        self._passes.add(one)
        return one

    def state(self) -> dict[str, Any]:
        state = self.rng.capture_own()
        if self.persistent and self.made is not None:
            state |= {"made": self.made, "workers": self.workers.states()}
        if self._dataset_remembers:
            state["dataset"] = self.loader.dataset.state_dict()
        return state

    def restore(self, state: Mapping[str, Any]) -> None:
        self.forget_workers()
        self.own = state
        self.rng.restore_own(state)
        self.made = state.get("made")
        self.workers = WorkerStates(self.count, self.fitting(state.get("workers")))
        if "dataset" in state and self._dataset_remembers:
            self.loader.dataset.load_state_dict(state["dataset"])

    def fitting(self, states: Sequence[Mapping[str, Any]] | None) -> Sequence[Mapping[str, Any]]:
        if states is not None and len(states) != self.count:
            log.warning(
                "the run had %d DataLoader workers and has %d now: random numbers drawn in workers differ",
                len(states),
                self.count,
            )
            return ()
        return states or ()

    def iterate(
        self, plan: SkipPlan, states: Sequence[Mapping[str, Any]], position: Any, done: Mapping[str, Any] | None
    ) -> Iterator[Any]:
        """A new iterator of torch's, over a copy of the loader as it is now. `done`: the samples that come before what
        it deals out."""
        loader = self.loader
        if done is not None:
            changes = behind(loader, done)
            assert changes is not None
            loader = _changed(loader, changes)
        auto = loader.batch_sampler is not None
        self.indices.inner = loader.batch_sampler if auto else loader.sampler
        self.indices.plan = plan
        changes = {"batch_sampler" if auto else "sampler": self.indices, "_iterator": self._iterator}
        items = None
        if self.iterable and not isinstance(loader.dataset, IterDataPipe):
            items = self.items
            items.go_on(position, None)
            changes["dataset"] = TrackedIterable(loader.dataset, items)
        elif plan.blanks:
            changes["dataset"] = PlaceholderDataset(loader.dataset)
        if not self.count:
            return iter(_changed(loader, changes))
        changes["collate_fn"] = collate = Collate(loader.collate_fn, items)
        changes["worker_init_fn"] = start = Start(loader.worker_init_fn, collate, items)
        start.states, start.blanks = states, plan.blanks
        copy = _changed(loader, changes)
        with noted(self._children):
            iterator: Iterator[Any] = iter(copy)
        self._iterator = copy._iterator
        return iterator

    def forget_workers(self) -> None:
        """The next pass makes new ones."""
        if self._iterator is not None:
            self.end_workers()

    def end_workers(self) -> None:
        end(list(self._children), self._let_go)
        self._let_go()

    def _let_go(self) -> None:
        # Torch asks its workers to end when nobody holds the iterator any more.
        self._iterator = None
        for one in list(self._passes):
            one.close()


class TorchLoaderPass(Pass):
    """One pass over it."""

    def __init__(self, source: TorchLoaderSource, saved: Mapping[str, Any] | None, enter: Enter | None) -> None:
        super().__init__(saved, enter)
        self._source = source
        self._batches: Iterator[Any] = iter(())
        self._start: Mapping[str, Any] = {}
        """The random numbers before torch's iterator was made."""
        self._reused = False
        """The workers were there before the pass."""
        self._workers = WorkerStates(0)
        self._workers_then: list[dict[str, Any]] = []
        self._in_flight = 0
        """How many batches an owner that fetches ahead had not given out at the last mark."""
        self._held: deque[tuple[int, Shipped]] = deque()
        """Fetched ahead, with their numbers: until they are marked, their workers are not yet there."""
        self._fetched: deque[Any] = deque()
        """Fetched ahead before the resume, and not yet yielded."""
        self._before: deque[_Before] = deque(maxlen=_KEPT)
        self._why_again = why_inexact(source.loader.dataset) or NO_STATE
        self._turns: deque[tuple[int, int]] = deque()
        """Of workers that read a stream: the number of a batch, and who made it; until it is marked."""
        given: Sequence[int] = self._saved.get("given", ())
        self._given = list(given) if len(given) == source.count else [0] * source.count
        """How many each of them made."""

    def mark(self, up_to: int | None = None) -> None:
        """`up_to`: so many batches, of an owner that fetches ahead. Default: all."""
        self._marked = self._yielded
        if self._source.ahead:
            self._marked = self._yielded if up_to is None else min(up_to, self._yielded)
            self._in_flight = self._yielded - self._marked
            while self._held and self._held[0][0] < self._marked:
                self._workers.saw(self._held.popleft()[1])
        while self._turns and self._turns[0][0] < self._marked:
            self._given[self._turns.popleft()[1]] += 1
        if self._workers.since:
            self._workers.mark()
        while self._before and self._before[0].number < self._marked:
            self._before.popleft()

    def begin_unread(self) -> None:
        """For an owner that leaves the reading to another rank: draw what a new pass draws, and that is all."""
        if self._enter is not None:
            self._enter()
        if not self._yielded and self._dealt is None:
            self._begin()
        self._begun = True

    def _begin(self) -> None:
        if self._saved.get("ended"):
            return
        try:
            self._go_to_position()
        except PositionError as error:
            self._forget_position(error)
            self._go_to_position()

    def _forget_position(self, error: PositionError, *more: str) -> None:
        """All that is left is how many batches were read: they are read again, from the start of the pass."""
        self._why_again = f"cannot load the position that it saved ({error.cause})"
        lost = ("dataset", "last", "workers", *more)
        kept = {name: value for name, value in self._saved.items() if name not in lost}
        self._saved = {**kept, "workers": kept.get("workers_at_start")}

    def _go_to_position(self) -> None:
        source, saved, count = self._source, self._saved, self._yielded - self._at
        self._fetched.clear()
        self._before.clear()
        entry = capture_rng({}) if count or self._dealt else None
        if "start" in saved:
            source.forget_workers()
            source.rng.restore(saved["start"])
        self._start = source.rng.capture()
        states = source.fitting(saved.get("workers"))
        remake = source.persistent and not source.alive and source.made is not None and saved.get("reused", True)
        self._reused = source.persistent and (source.alive or remake)
        source.workers.new_pass()
        if remake:
            assert source.made is not None
            states = states or source.workers.states()
            source.rng.restore(source.made)
        elif not self._reused:
            source.made = self._start
        if not source.alive:
            source.workers = WorkerStates(source.count, states)
        self._workers = source.workers
        if source.iterable:
            self._workers_then = saved.get("workers_at_start", self._workers.states())
        self._position(count, states, again=remake)
        if entry is not None:
            restore_global(entry)
            if source.own is not None and not saved.get("loose"):
                source.rng.restore_generators(source.own)

    def _position(self, count: int, states: Sequence[Mapping[str, Any]], *, again: bool) -> None:
        """Make torch's iterator and take it to the position. `again`: with workers that an earlier pass had made."""
        source, saved = self._source, self._saved
        begin = (lambda: source.rng.restore(self._start)) if again else None
        position, last = saved.get("dataset"), saved.get("last") if states else None
        if not source.iterable:
            blanks = count % source.count if source.count else 0
            plan = SkipPlan(count, blanks, draw=self._dealt is not None, begin=begin)
        else:
            plan = SkipPlan(0, (last + 1) % source.count if last is not None else 0, begin=begin)
        unknown = source.iterable and position is None and last is None
        done = self._dealt if unknown or not source.iterable else None
        self._batches = source.iterate(plan, states, position, done)
        if unknown:
            read_again(self._noted(), count, f"the dataset {type(source.loader.dataset).__name__}", self._why_again)
            self._workers.mark()
        if not source.count:
            source.indices.follow_plan()
        for _ in range(plan.blanks):
            next(self._batches)
        if count and "ahead" in saved:
            # They were fetched before the mark, so it is done again with the random numbers of then.
            if saved["ahead"] is not None:
                restore_global(saved["ahead"])
            self._before.append(_Before(self._yielded, saved["ahead"], position))
            self._fetched.extend(islice(self._batches, source.ahead))
            self._in_flight = len(self._fetched)

    def _fetch(self) -> Any:
        source = self._source
        if self._fetched:
            item = self._fetched.popleft()
        else:
            try:
                item = self._next()
            except PositionError as error:
                # Workers load theirs when their turn comes, perhaps some batches later.
                self._forget_position(error, "ahead")
                self._go_to_position()
                item = self._next()
            except StopIteration:
                if not source.ahead:
                    self._workers.mark()
                raise
        if not source.count:
            return item
        if source.iterable:
            self._turns.append((self._yielded, item[1]))
        if source.ahead:
            self._held.append((self._yielded, item))
        elif item[2] is not None or item[3] is not None:
            self._workers.saw(item)
        return item[0]

    def _noted(self) -> Iterator[Any]:
        """Batches that are read again: where their workers are afterwards is known."""
        for item in self._batches:
            if self._source.count:
                self._workers.saw(item)
            yield item

    def _next(self) -> Any:
        source = self._source
        if not source.count and (source.ahead or (source.iterable and self._yielded == self._marked)):
            rng = snapshot_rng(as_bytes=False) if source.ahead else None
            self._before.append(_Before(self._yielded, rng, source.items.position()))
        return next(self._batches)

    def _state(self) -> dict[str, Any]:
        source, ahead = self._source, self._yielded - self._marked
        state: dict[str, Any] = {
            "start": self._start,
            "reused": self._reused,
            "ended": self.exhausted and not ahead,
            "read": self._marked - self._at,
            "size": size_of(source.loader),
        }
        if source.iterable:
            state |= {"apart": apart(source.loader), "given": list(self._given)}
        before = next((one for one in self._before if one.number == self._marked), None)
        if ahead and source.ahead:
            state["ahead"] = (
                before.rng.plain() if before and isinstance(before.rng, RngSnapshot) else before and before.rng
            )
        if ahead > self._in_flight:
            state["loose"] = True
        if source.count:
            last = self._workers.last
            state["workers"] = self._workers.states() if last is not None or not source.iterable else self._workers_then
            if last is not None:
                state |= {"last": last, "workers_at_start": self._workers_then}
        elif source.iterable:
            position = before.position if ahead and before else source.items.position()
            if position is not None:
                state["dataset"] = position
        return state

    def close(self) -> None:
        super().close()
        self._batches = iter(())
        self._fetched.clear()


@dataclass(frozen=True)
class _Before:
    """What was before the fetch of a batch, in a pass without workers."""

    number: int
    rng: RngSnapshot | Mapping[str, Any] | None
    position: Mapping[str, Any] | None
    """Of an iterable dataset."""


def _changed(loader: Any, changes: Mapping[str, Any]) -> Any:
    """A copy of a loader with other attributes. (copy.copy would go through what a subclass has for pickling.)"""
    copy = object.__new__(type(loader))
    copy.__dict__.update(loader.__dict__)
    copy.__dict__.update(changes)
    return copy
