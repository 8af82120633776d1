"""A rank that dies without a word is noticed: each rank says now and then that it lives, and listens for one other.

Without this the others would wait for it in a collective for as long as that waits, which may be for ever. A beat is
three short calls on a background thread; nothing is asked of the training thread. No collectives here.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from datetime import timedelta

from reprieve.errors import RankFailed, RanksError
from reprieve.ranks.group import Ranks
from reprieve.ranks.store import Store, prefixed

log = logging.getLogger("reprieve")

_BEATS = 10
"""Within the limit. Fewer, and one that is late would look like death."""
_LONGEST_S = 10.0


class Liveness:
    """From now until `close`. `on_dead` is called once, on a background thread, on every rank that lives."""

    def __init__(self, ranks: Ranks, limit: timedelta, on_dead: Callable[[RankFailed], object]) -> None:
        """`limit`: a rank that was not heard of for so long is dead."""
        self._rank, self._world_size = ranks.rank, ranks.world_size
        self._limit_s = limit.total_seconds()
        self._on_dead = on_dead
        self._closed = threading.Event()
        self._heard: tuple[bytes | None, float] | None = None
        """The last beat of the other one, and when it was new."""
        if self._world_size > 1:
            store = prefixed(ranks.store.client(), "alive")
            threading.Thread(target=self._run, args=(store,), name="reprieve liveness", daemon=True).start()

    def close(self) -> None:
        """This rank is done: its silence means nothing."""
        self._closed.set()

    def _run(self, store: Store) -> None:
        try:
            while not self._closed.wait(min(self._limit_s / _BEATS, _LONGEST_S)):
                store.add(str(self._rank), 1)
                if (dead := self._look(store)) is not None:
                    self._on_dead(RankFailed(dead, f"was not heard of for {self._limit_s:g} s: it has died, or hangs"))
                    return
            store.set(f"left/{self._rank}", b"1")
        except RanksError as error:
            # Whoever needs the store says that it is gone; whether others live cannot be known without it.
            log.debug("rank %d no longer hears of the others: %s", self._rank, error)
        finally:
            store.close()

    def _look(self, store: Store) -> int | None:
        """Who is dead, as far as anybody knows."""
        if (told := store.get("dead")) is not None:
            return int(told)
        other = (self._rank + 1) % self._world_size
        beat, now = store.get(str(other)), time.monotonic()
        if self._heard is None or self._heard[0] != beat:
            self._heard = beat, now
        elif now - self._heard[1] > self._limit_s and store.get(f"left/{other}") is None:
            return int(store.put_once("dead", str(other).encode()))
        return None
