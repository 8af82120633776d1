"""The states of a DataLoader's workers: captured in the workers, kept in the main process, restored after a resume.

    WorkerInit        runs as `worker_init_fn`: restores a worker's state
    ReportingCollate  runs as `collate_fn`: sends the worker's random number generators with a batch, if they changed
    WorkerStates      in the main process: each worker's state after its last consumed batch

Worker w of W makes the batches w, w + W, w + 2W, …: its state after one of them is its state before the next. Batches
that workers have made beyond the position are made again after a resume, from the same random numbers.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any

from torch.utils.data import get_worker_info

from reprieve.data.dataset_proxies import IterableCursor
from reprieve.data.positions import WorkerPosition
from reprieve.data.resumable_sampler import Placeholder
from reprieve.rng import RngSnapshot, restore_rng, snapshot_rng

WorkerBatch = tuple[Any, int, bytes | None, bytes | None]
"""What a worker sends: the batch, the worker's number, its random number generators after the batch (None: unchanged),
and the position of an iterable dataset, if that has one. The last two are pickled, so that the main process does not
spend time on them unless they are saved. A plain tuple unpickles 15 µs faster than a named one. `pin_memory` pins the
batch and leaves the rest as it is."""


class ReportingCollate:
    """The user's `collate_fn`, plus the worker's state."""

    def __init__(self, users_collate: Callable[[Any], Any], cursor: IterableCursor | None) -> None:
        self._users_collate = users_collate
        self._cursor = cursor
        self.last_rng: RngSnapshot | None = None

    def __call__(self, data: Any) -> WorkerBatch:
        info = get_worker_info()
        assert info is not None
        if isinstance(data, Placeholder) or (
            isinstance(data, list) and len(data) == 1 and isinstance(data[0], Placeholder)
        ):
            return None, info.id, None, None
        batch = self._users_collate(data)
        rng = None
        now = snapshot_rng()
        if now != self.last_rng:
            self.last_rng = now
            rng = pickle.dumps(now, pickle.HIGHEST_PROTOCOL)
        position = self._cursor.position() if self._cursor is not None else None
        pickled = pickle.dumps(position, pickle.HIGHEST_PROTOCOL) if position is not None else None
        return batch, info.id, rng, pickled


class WorkerInit:
    """The user's `worker_init_fn`, plus the restoring of a worker's state."""

    def __init__(
        self,
        users_init: Callable[[int], None] | None,
        collate: ReportingCollate,
        cursor: IterableCursor | None,
        *,
        positions: Sequence[WorkerPosition],
        placeholders: int,
    ) -> None:
        """`positions`: one for each worker; empty: all start at the beginning. So many workers, from worker 0 on, get
        a placeholder first."""
        self._users_init = users_init
        self._collate = collate
        self._cursor = cursor
        self._positions = positions
        self._placeholders = placeholders

    def __call__(self, worker: int) -> None:
        if self._users_init is not None:
            self._users_init(worker)
        position = self._positions[worker] if self._positions else WorkerPosition()
        if self._cursor is not None:
            # `iter(dataset)` comes after this and may draw: the cursor restores the random numbers after it.
            self._cursor.resume_at(position.dataset, position.rng, placeholder=worker < self._placeholders)
        if position.rng is not None:
            restore_rng(position.rng, {})
        self._collate.last_rng = snapshot_rng()


class WorkerStates:
    """The states of all workers at the last mark."""

    def __init__(self, num_workers: int, positions: Sequence[WorkerPosition] = ()) -> None:
        self._num_workers = num_workers
        self._rng: dict[int, Any] = {worker: position.rng for worker, position in enumerate(positions)}
        self._datasets: dict[int, Any] = {worker: position.dataset for worker, position in enumerate(positions)}
        self._unmarked_rng: dict[int, bytes] = {}
        self._unmarked_datasets: dict[int, bytes] = {}
        self._unmarked_last_worker: int | None = None
        self.last_worker: int | None = None
        """The worker that made the last batch before the mark, if its dataset has a position."""

    def record(self, batch: WorkerBatch) -> None:
        """Keep what a worker sent with a batch until the next mark."""
        _, worker, rng, dataset = batch
        if rng is not None:
            self._unmarked_rng[worker] = rng
        if dataset is not None:
            self._unmarked_datasets[worker] = dataset
            self._unmarked_last_worker = worker

    def mark(self) -> None:
        if self._unmarked_rng or self._unmarked_datasets:
            self._rng.update(self._unmarked_rng)
            self._datasets.update(self._unmarked_datasets)
            self._unmarked_rng.clear()
            self._unmarked_datasets.clear()
            self.last_worker = self._unmarked_last_worker

    def start_pass(self) -> None:
        """Keep the random numbers of persistent workers; they iterate their dataset from its start."""
        self.mark()
        self._datasets.clear()
        self._unmarked_last_worker = self.last_worker = None

    def positions(self) -> list[WorkerPosition]:
        """Return one position for each worker, in plain types."""
        return [
            WorkerPosition(rng=_unpickled(self._rng.get(worker)), dataset=_unpickled(self._datasets.get(worker)))
            for worker in range(self._num_workers)
        ]


def _unpickled(value: Any) -> Any:
    """Return what a worker has sent, or what was restored and has not been sent since."""
    if isinstance(value, bytes):
        value = pickle.loads(value)  # noqa: S301 (from our own worker, never from a file)
    return value.plain() if isinstance(value, RngSnapshot) else value
