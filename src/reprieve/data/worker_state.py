"""What runs inside the workers of a DataLoader, and what the main process keeps of it.

    Start     as worker_init_fn: puts a worker to where it was
    Collate   as collate_fn: sends along with each batch the random numbers after it, if they changed
    Workers   in the main process: each worker as it was after the last batch of it that is consumed

Worker w makes the batches w, w + W, w + 2W, …; after one is before the next. What workers have made beyond the
position is made again after a resume, from the same random numbers.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.utils.data import get_worker_info

from reprieve.data.dataset_proxies import IterableCursor
from reprieve.data.resumable_sampler import Placeholder
from reprieve.rng import RngSnapshot, restore_rng, snapshot_rng

Shipped = tuple[Any, int, bytes | None, bytes | None]
"""A batch on its way: the batch, the worker's number, its random numbers after it (None: as before), and the dataset's
own position, if it has one. Pickled, so that the main process has nothing to do with them unless they are saved; and a
plain tuple, which it unpickles 15 µs sooner than a named one. `pin_memory` pins the batch and leaves the rest."""


class Collate:
    """Around the user's `collate_fn`."""

    def __init__(self, users: Callable[[Any], Any], items: IterableCursor | None) -> None:
        self._users = users
        self._items = items
        self.last: RngSnapshot | None = None

    def __call__(self, data: Any) -> Shipped:
        info = get_worker_info()
        assert info is not None
        if isinstance(data, Placeholder) or (
            isinstance(data, list) and len(data) == 1 and isinstance(data[0], Placeholder)
        ):
            return None, info.id, None, None
        batch = self._users(data)
        rng = None
        now = snapshot_rng()
        if now != self.last:
            self.last = now
            rng = pickle.dumps(now, pickle.HIGHEST_PROTOCOL)
        position = self._items.position() if self._items is not None else None
        sent = pickle.dumps(position, pickle.HIGHEST_PROTOCOL) if position is not None else None
        return batch, info.id, rng, sent


class Start:
    """Around the user's `worker_init_fn`."""

    def __init__(self, users: Callable[[int], None] | None, collate: Collate, items: IterableCursor | None) -> None:
        self._users = users
        self._collate = collate
        self._items = items
        self.states: Sequence[Mapping[str, Any]] = ()
        """Where each worker goes on; empty: at the beginning."""
        self.blanks = 0

    def __call__(self, worker: int) -> None:
        if self._users is not None:
            self._users(worker)
        state = self.states[worker] if self.states else {}
        rng = state.get("rng")
        if self._items is not None:
            # `iter(dataset)` comes after this, and may draw: the random numbers are put back behind it.
            self._items.go_on(state.get("data"), rng, blank=worker < self.blanks)
        if rng is not None:
            restore_rng(rng, {})
        self._collate.last = snapshot_rng()


class WorkerStates:
    """The states of all workers at the last mark."""

    def __init__(self, count: int, states: Sequence[Mapping[str, Any]] = ()) -> None:
        self._count = count
        self._marked: dict[tuple[int, str], Any] = {
            (worker, part): value for worker, state in enumerate(states) for part, value in state.items()
        }
        self.since: dict[tuple[int, str], Any] = {}
        """What was seen after the mark."""
        self._last: int | None = None
        self.last: int | None = None
        """The worker whose batch was the last before the mark, if its dataset says where it is."""

    def saw(self, shipped: Shipped) -> None:
        _, worker, rng, data = shipped
        if rng is not None:
            self.since[worker, "rng"] = rng
        if data is not None:
            self.since[worker, "data"] = data
            self._last = worker

    def mark(self) -> None:
        if self.since:
            self._marked.update(self.since)
            self.since.clear()
            self.last = self._last

    def new_pass(self) -> None:
        """Persistent workers go on with their random numbers, and iterate their dataset from its start."""
        self.mark()
        self._marked = {key: value for key, value in self._marked.items() if key[1] != "data"}
        self._last = self.last = None

    def states(self) -> list[dict[str, Any]]:
        """One for each worker, in plain types."""
        return [
            {
                part: _unpacked(self._marked[worker, part])
                for part in ("rng", "data")
                if self._marked.get((worker, part)) is not None
            }
            for worker in range(self._count)
        ]


def _unpacked(value: Any) -> Any:
    """What a worker of ours has sent, or what was restored and not sent since."""
    if isinstance(value, bytes):
        value = pickle.loads(value)  # noqa: S301 (from our own worker, never from a file)
    return value.plain() if isinstance(value, RngSnapshot) else value
