"""Boundaries: the points where a run can stop, and where all ranks agree that it does.

A run comes to a boundary before every fetch of a batch, before and in every evaluation and after every epoch. All
ranks count boundaries alike, and `StepAgreement` finds one that no rank is beyond. Evaluations may have different
lengths on different ranks: batches in them are counted by themselves, and the end of one comes after the last batch of
any rank. While nothing is requested, a boundary costs a few microseconds.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from time import monotonic as _now

from reprieve.checkpoint.coordinated_schedule import TimedSaveRequests
from reprieve.checkpoint.schedule import Schedule
from reprieve.errors import RankFailed, RanksError, StoreLost
from reprieve.preemption.stop_listener import ANOTHER_RANK, StopListener
from reprieve.ranks.group import Ranks
from reprieve.ranks.liveness import Liveness
from reprieve.ranks.step_agreement import StepAgreement
from reprieve.ranks.step_protocol import STOP

log = logging.getLogger("reprieve")

_LOOK_S = 0.05
"""How often to look, at most, at what nobody tells us: who has taken our wake-up descriptor, and what time it is."""
_MINOR_BITS = 24
_END = 2**_MINOR_BITS - 1
"""The end of an evaluation, on every rank."""


class Boundaries:
    """Counts them, and knows what is asked for."""

    def __init__(
        self,
        ranks: Ranks,
        stop_listener: StopListener,
        schedule: Schedule,
        on_lost: Callable[[RanksError], object],
        on_look: Callable[[], None],
    ) -> None:
        """`on_lost`: told, on a background thread, that ranks are dead or cannot agree any more. `on_look`: called on
        the training thread, 20 times a second at most."""
        self.has_request = False
        """One of these two."""
        self.stop_requested = False
        """All ranks know, at this same boundary, that the run must stop."""
        self.save_requested = False
        """The same of a periodic save."""
        self._stop_listener = stop_listener
        self._look_at = 0.0
        self._major = 0
        self._minor = 0
        self._common = StepAgreement(ranks, completed=0, on_lost=on_lost, on_stop=self._another_stops)
        self._timed_saves = TimedSaveRequests(schedule, self._common, ranks.rank)
        self._dead: RankFailed | None = None
        self._liveness = Liveness(ranks, ranks.limit, self._died)
        self._on_lost = on_lost
        self._on_look = on_look

    @property
    def at_first_boundary(self) -> bool:
        """No rank, as far as is known here, has come to a second one: nobody has trained anything."""
        return max(self._major, (self._common.agreed or 0) >> _MINOR_BITS) <= 1

    def request_stop(self) -> None:
        """From any thread."""
        self._common.request(STOP)

    def save_is_due(self) -> None:
        """By the count of steps or epochs, so on every rank."""
        self.has_request = self.save_requested = True

    def step(self) -> None:
        """The training thread, between two batches, evaluations or epochs."""
        self._major += 1
        self._minor = 0
        self._at(self._major << _MINOR_BITS)

    def evaluation_step(self) -> None:
        """The training thread, before a batch of an evaluation."""
        self._minor = min(self._minor + 1, _END - 1)
        self._at(self._major << _MINOR_BITS | self._minor)

    def evaluation_end(self) -> None:
        """The training thread, after the last."""
        self._at(self._major << _MINOR_BITS | _END)

    def saved(self) -> None:
        self.save_requested = False
        self._timed_saves.served()
        self.has_request = self.stop_requested

    def finish(self) -> None:
        """No more boundaries here."""
        self._common.finish()

    def close(self) -> None:
        self._liveness.close()
        self._common.close()

    def _another_stops(self) -> None:
        self._stop_listener.request(ANOTHER_RANK)  # without effect where it was this one

    def _died(self, error: RankFailed) -> None:
        log.error("%s. The others end", error)
        self._dead = error
        self._on_lost(error)

    def _at(self, completed: int) -> None:
        # At every step of a run, and most of it cold in the cache: each call that is not made is a microsecond.
        if (now := _now()) >= self._look_at:
            self._look_at = now + _LOOK_S
            self._look()
        if self._dead is not None:
            raise self._dead
        try:
            while (request := self._common.boundary(completed)) is not None:
                self.has_request = True
                if request.kind == STOP:
                    self.stop_requested = True
                else:
                    self.save_requested = True
        except StoreLost as error:
            if self._stop_listener.stop is not None:
                raise
            log.error("the ranks could not agree on a save: %s. Training goes on without", error)

    def _look(self) -> None:
        self._stop_listener.reassert_signals()
        self._on_look()
        self._timed_saves.poll()
