"""One pass over a torch DataLoader, from its start or from a saved position.

A resumed pass takes these steps:
  1. Restore the random number generators of the start of the pass.
  2. Make torch's iterator (torch draws the workers' seed there), with workers in their saved states.
  3. Skip the consumed batches: their indices for a map-style dataset (`_seek_samples`); an iterable dataset loads its
     own position, or is replayed (`_seek_stream`).
  4. Fetch again what accelerate had fetched ahead.
  5. Restore the random number generators of the interrupted process.
Persistent workers outlive a pass: their seed comes from the pass that made them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

from reprieve.data.base import BeforeFirstFetch, Pass
from reprieve.data.dataset_proxies import PositionError
from reprieve.data.hf_streams import why_inexact
from reprieve.data.loader_rng import restore_global
from reprieve.data.positions import DatasetPosition, FetchedAhead, PassPosition, WorkerPosition
from reprieve.data.redistribution import independent_readers, samples_per_batch
from reprieve.data.replay import NO_STATE, replay
from reprieve.data.resumable_sampler import SkipPlan
from reprieve.data.workers.state import WorkerBatch, WorkerStates
from reprieve.rng import RngSnapshot, capture_rng, snapshot_rng

if TYPE_CHECKING:
    from reprieve.data.torch_loader import TorchLoaderSource

_MAX_SNAPSHOTS = 256
"""How many fetches between two marks keep a snapshot, of 15 kB each."""


@dataclass(frozen=True)
class _FetchSnapshot:
    """What was before the fetch of a batch in the main process."""

    batch: int
    rng: RngSnapshot | Mapping[str, Any] | None
    dataset: DatasetPosition | None

    def plain_rng(self) -> Mapping[str, Any] | None:
        return self.rng.plain() if isinstance(self.rng, RngSnapshot) else self.rng


class _WorkerProgress:
    """How far the workers of a pass are at the last mark."""

    def __init__(self, source: TorchLoaderSource, saved: PassPosition) -> None:
        self._num_workers = source.num_workers
        self._is_iterable = source.is_iterable
        self._read_ahead = source.read_ahead
        self._states = WorkerStates(0)
        self._at_start: Sequence[WorkerPosition] = ()
        self._unmarked: deque[tuple[int, WorkerBatch]] = deque()
        """With read-ahead: batches that were fetched and are not yet marked, by number."""
        self._unmarked_turns: deque[tuple[int, int]] = deque()
        """For a stream: the numbers of batches that are not yet marked, and the workers that made them."""
        by_worker = saved.batches_by_worker or ()
        self.batches_by_worker = list(by_worker) if len(by_worker) == self._num_workers else [0] * self._num_workers

    def begin(self, states: WorkerStates, saved: PassPosition) -> None:
        """Take over the states in which the workers start."""
        self._states = states
        if self._is_iterable:
            saved_start = saved.workers_at_start
            self._at_start = saved_start if saved_start is not None else states.positions()

    def receive(self, number: int, fetched: WorkerBatch) -> Any:
        """Take a batch from a worker. Returns the user's batch."""
        if self._is_iterable:
            self._unmarked_turns.append((number, fetched[1]))
        if self._read_ahead:
            self._unmarked.append((number, fetched))
        else:
            self._states.record(fetched)
        return fetched[0]

    def replayed(self, fetched: Iterator[WorkerBatch]) -> Iterator[WorkerBatch]:
        """Record the states of workers whose batches are replayed."""
        for batch in fetched:
            if self._num_workers:
                self._states.record(batch)
            yield batch

    def mark(self, marked: int) -> None:
        while self._unmarked and self._unmarked[0][0] < marked:
            self._states.record(self._unmarked.popleft()[1])
        while self._unmarked_turns and self._unmarked_turns[0][0] < marked:
            self.batches_by_worker[self._unmarked_turns.popleft()[1]] += 1
        self._states.mark()

    def mark_states(self) -> None:
        """Mark all recorded states, whether or not their batches are marked."""
        self._states.mark()

    def add_to(self, position: PassPosition) -> PassPosition:
        """Return the position with the states of the workers."""
        last_worker = self._states.last_worker
        if last_worker is not None:
            return replace(
                position,
                workers=self._states.positions(),
                workers_at_start=self._at_start,
                last_worker=last_worker,
            )
        return replace(position, workers=self._at_start if self._is_iterable else self._states.positions())


class TorchLoaderPass(Pass):
    """A pass over a DataLoader."""

    def __init__(
        self, source: TorchLoaderSource, saved: PassPosition | None, before_first_fetch: BeforeFirstFetch | None
    ) -> None:
        super().__init__(saved, before_first_fetch)
        self._source = source
        self._batches: Iterator[Any] = iter(())
        self._start_rng: Mapping[str, Any] = {}
        """The random number generators before torch's iterator was made."""
        self._workers_reused = False
        """The workers were running before the pass."""
        self._workers = _WorkerProgress(source, self._saved)
        self._snapshots: deque[_FetchSnapshot] = deque(maxlen=_MAX_SNAPSHOTS)
        self._fetched_again: deque[Any] = deque()
        """Batches that were fetched ahead before the resume, and are not yet yielded."""
        self._ahead_at_mark = 0
        """How many batches accelerate had fetched but not yielded at the last mark."""
        self._replay_reason = why_inexact(source.loader.dataset) or NO_STATE

    def mark(self, up_to: int | None = None) -> None:
        """Count batches as consumed. With read-ahead only the first `up_to` of the pass. Default: all."""
        self._marked = self._yielded
        if self._source.read_ahead:
            if up_to is not None:
                self._marked = min(up_to, self._yielded)
            self._ahead_at_mark = self._yielded - self._marked
        self._workers.mark(self._marked)
        while self._snapshots and self._snapshots[0].batch < self._marked:
            self._snapshots.popleft()

    def begin_without_reading(self) -> None:
        """Begin on a rank for which another rank reads: draw what a new pass draws, and nothing more."""
        if self._before_first_fetch is not None:
            self._before_first_fetch()
        if not self._yielded and self._redistribution is None:
            self._begin()
        self._begun = True

    def close(self) -> None:
        super().close()
        self._batches = iter(())
        self._fetched_again.clear()

    # Going to the position

    def _begin(self) -> None:
        if self._saved.ended:
            return
        try:
            self._seek()
        except PositionError as error:
            self._seek_without_position(error)

    def _seek_without_position(self, error: PositionError) -> None:
        """Replay from the start of the pass, because the dataset could not load its position."""
        self._replay_reason = f"cannot load the position that it saved ({error.cause})"
        self._saved = replace(self._saved, dataset=None, last_worker=None, workers=self._saved.workers_at_start)
        self._seek()

    def _seek(self) -> None:
        source, saved, count = self._source, self._saved, self._yielded - self._first_batch
        self._fetched_again.clear()
        self._snapshots.clear()
        global_rng = capture_rng({}) if count or self._redistribution else None
        if saved.start_rng is not None:
            source.drop_persistent_workers()
            source.rng.restore(saved.start_rng)
        self._start_rng = source.rng.capture()
        workers, restore_start = self._prepare_workers()
        if source.is_iterable:
            self._seek_stream(count, workers, restore_start)
        else:
            self._seek_samples(count, workers, restore_start)
        if count and saved.fetched_ahead is not None:
            self._fetch_again(saved.fetched_ahead)
        if global_rng is not None:
            restore_global(global_rng)
            if source.restored_rng is not None and not saved.generators_are_past:
                source.rng.restore_generators(source.restored_rng)

    def _prepare_workers(self) -> tuple[Sequence[WorkerPosition], Callable[[], None] | None]:
        """Return the states in which new workers start. If an earlier pass had made the workers, the generators are
        then as before that, and the second value restores those of the start of this pass."""
        source, saved, running = self._source, self._saved, self._source.has_persistent_workers
        positions = source.check_worker_count(saved.workers)
        restore_start = None
        source.workers.start_pass()
        if source.is_persistent and not running and source.rng_before_workers is not None and saved.workers_reused:
            positions = positions or source.workers.positions()
            source.rng.restore(source.rng_before_workers)
            restore_start = self._restore_start_rng
        self._workers_reused = source.is_persistent and (running or restore_start is not None)
        if not self._workers_reused:
            source.rng_before_workers = self._start_rng
        if not running:
            source.workers = WorkerStates(source.num_workers, positions)
        self._workers.begin(source.workers, saved)
        return positions, restore_start

    def _restore_start_rng(self) -> None:
        self._source.rng.restore(self._start_rng)

    def _seek_samples(
        self, count: int, workers: Sequence[WorkerPosition], restore_start: Callable[[], None] | None
    ) -> None:
        """Map-style: skip the indices of consumed batches. With workers, the next batch goes to the right one."""
        source = self._source
        placeholders = count % source.num_workers if source.num_workers else 0
        plan = SkipPlan(count, placeholders, draw_order=self._redistribution is not None, restore_start=restore_start)
        self._batches = source.iterate(plan, workers, None, self._redistribution)
        if not source.num_workers:
            source.sampler.follow_plan()
        self._drop_placeholders(plan)

    def _seek_stream(
        self, count: int, workers: Sequence[WorkerPosition], restore_start: Callable[[], None] | None
    ) -> None:
        """Iterable: the dataset loads its position, here or in the workers. Without a position, replay."""
        source, saved = self._source, self._saved
        last_worker = saved.last_worker if workers else None
        placeholders = (last_worker + 1) % source.num_workers if last_worker is not None else 0
        plan = SkipPlan(placeholders=placeholders, restore_start=restore_start)
        if saved.dataset is not None or last_worker is not None:
            self._batches = source.iterate(plan, workers, saved.dataset, None)
            self._drop_placeholders(plan)
            return
        self._batches = source.iterate(plan, workers, None, self._redistribution)
        what = f"the dataset {type(source.loader.dataset).__name__}"
        replay(self._workers.replayed(self._batches), count, what, self._replay_reason)
        self._workers.mark_states()

    def _drop_placeholders(self, plan: SkipPlan) -> None:
        for _ in range(plan.placeholders):
            next(self._batches)

    def _fetch_again(self, ahead: FetchedAhead) -> None:
        """Fetch what was fetched ahead at the mark, with the random numbers of that time."""
        if ahead.rng is not None:
            restore_global(ahead.rng)
        self._snapshots.append(_FetchSnapshot(self._yielded, ahead.rng, self._saved.dataset))
        self._fetched_again.extend(islice(self._batches, self._source.read_ahead))
        self._ahead_at_mark = len(self._fetched_again)

    # Fetching

    def _fetch(self) -> Any:
        fetched = self._fetched_again.popleft() if self._fetched_again else self._fetch_new()
        return self._workers.receive(self._yielded, fetched) if self._source.num_workers else fetched

    def _fetch_new(self) -> Any:
        try:
            return self._next()
        except PositionError as error:
            # Workers load their positions when their turn comes, perhaps some batches later.
            self._saved = replace(self._saved, fetched_ahead=None)
            self._seek_without_position(error)
            return self._next()
        except StopIteration:
            if not self._source.read_ahead:
                self._workers.mark_states()
            raise

    def _next(self) -> Any:
        source = self._source
        is_at_mark = self._yielded == self._marked
        if not source.num_workers and (source.read_ahead or (source.is_iterable and is_at_mark)):
            rng = snapshot_rng(as_bytes=False) if source.read_ahead else None
            self._snapshots.append(_FetchSnapshot(self._yielded, rng, source.cursor.position()))
        return next(self._batches)

    # Saving the position

    def _position(self) -> PassPosition:
        source, unmarked = self._source, self._yielded - self._marked
        snapshot = next((snapshot for snapshot in self._snapshots if snapshot.batch == self._marked), None)
        is_ahead = unmarked > 0 and source.read_ahead > 0
        position = PassPosition(
            start_rng=self._start_rng,
            workers_reused=self._workers_reused,
            ended=self.exhausted and not unmarked,
            batches_read=self._marked - self._first_batch,
            samples_per_batch=samples_per_batch(source.loader),
            fetched_ahead=FetchedAhead(snapshot.plain_rng() if snapshot else None) if is_ahead else None,
            generators_are_past=unmarked > self._ahead_at_mark,
        )
        if source.is_iterable:
            position = replace(
                position,
                independent_readers=independent_readers(source.loader),
                batches_by_worker=list(self._workers.batches_by_worker),
            )
        if source.num_workers:
            return self._workers.add_to(position)
        if source.is_iterable:
            dataset = snapshot.dataset if unmarked and snapshot else source.cursor.position()
            return replace(position, dataset=dataset)
        return position
