"""Detects ranks that die silently: each rank sends heartbeats, and watches those of one other rank.

Without this, the others would wait for a dead rank in a collective until that times out, which may be never. A
heartbeat is three short calls on a background thread; the training thread does nothing for it. No collectives here.
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

BEATS_PER_LIMIT = 10
"""Heartbeats within the limit. With fewer, one late heartbeat would look like a death."""
MAX_BEAT_INTERVAL_S = 10.0


class Liveness:
    """The heartbeats of this rank, from now until `close`. Every rank that lives calls `on_dead` once, on a background
    thread."""

    def __init__(self, ranks: Ranks, limit: timedelta, on_dead: Callable[[RankFailed], object]) -> None:
        """`limit`: a rank that sends no heartbeat for so long is dead."""
        self._rank, self._world_size = ranks.rank, ranks.world_size
        self._limit_s = limit.total_seconds()
        self._on_dead = on_dead
        self._closed = threading.Event()
        self._last_beat: tuple[bytes | None, float] | None = None
        """The last heartbeat of the watched rank, and when it was new."""
        if self._world_size > 1:
            store = prefixed(ranks.store.client(), "alive")
            threading.Thread(target=self._run, args=(store,), name="reprieve liveness", daemon=True).start()

    def close(self) -> None:
        """Stop the heartbeats. The others no longer expect any from this rank."""
        self._closed.set()

    def _run(self, store: Store) -> None:
        try:
            while not self._closed.wait(min(self._limit_s / BEATS_PER_LIMIT, MAX_BEAT_INTERVAL_S)):
                store.add(str(self._rank), 1)
                if (dead := self._find_dead(store)) is not None:
                    self._on_dead(RankFailed(dead, f"sent no heartbeat for {self._limit_s:g} s: it is dead, or hangs"))
                    return
            store.set(f"left/{self._rank}", b"1")
        except RanksError as error:
            # Whoever needs the store reports that it is lost. Without it, nothing is known about other ranks.
            log.debug("rank %d stops sending heartbeats: %s", self._rank, error)
        finally:
            store.close()

    def _find_dead(self, store: Store) -> int | None:
        """Return the rank that some rank has found dead, or None."""
        if (found := store.get("dead")) is not None:
            return int(found)
        other = (self._rank + 1) % self._world_size
        beat, now = store.get(str(other)), time.monotonic()
        if self._last_beat is None or self._last_beat[0] != beat:
            self._last_beat = beat, now
        elif now - self._last_beat[1] > self._limit_s and store.get(f"left/{other}") is None:
            return int(store.put_once("dead", str(other).encode()))
        return None
