"""Boundaries: the points where a run can stop, and where all ranks agree that it does.

A run reaches a boundary before every fetch of a batch, before and in every evaluation, and after every epoch. All
ranks count boundaries alike, and `StepAgreement` finds one that no rank has passed. Evaluations may have different
lengths on different ranks: their batches have a count of their own, and the end of an evaluation counts as later than
the last batch of any rank. While nothing is requested, a boundary costs a few microseconds.
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

_POLL_INTERVAL_S = 0.05
"""How often to check what sends no event: the wake-up descriptor, which others may take, and the time."""
_MINOR_BITS = 24
_END = 2**_MINOR_BITS - 1
"""The end of an evaluation, on every rank."""


class Boundaries:
    """The boundary counter of one rank, and what is requested at the current boundary."""

    def __init__(
        self,
        ranks: Ranks,
        stop_listener: StopListener,
        schedule: Schedule,
        on_lost: Callable[[RanksError], object],
        on_poll: Callable[[], None],
    ) -> None:
        """`on_lost`: called on a background thread when ranks are dead or can no longer agree. `on_poll`: called on the
        training thread, at most 20 times a second."""
        self.has_request = False
        """A stop or a save is requested."""
        self.stop_requested = False
        """The run must stop here. All ranks see this at the same boundary."""
        self.save_requested = False
        """A periodic save is due here. All ranks see this at the same boundary."""
        self._stop_listener = stop_listener
        self._poll_at = 0.0
        self._major = 0
        self._minor = 0
        self._agreement = StepAgreement(ranks, completed=0, on_lost=on_lost, on_stop=self._on_remote_stop)
        self._timed_saves = TimedSaveRequests(schedule, self._agreement, ranks.rank)
        self._dead: RankFailed | None = None
        self._liveness = Liveness(ranks, ranks.limit, self._on_dead_rank)
        self._on_lost = on_lost
        self._on_poll = on_poll

    @property
    def at_first_boundary(self) -> bool:
        """Whether no rank, as far as this one knows, has reached a second boundary: nothing was trained."""
        return max(self._major, (self._agreement.agreed or 0) >> _MINOR_BITS) <= 1

    def request_stop(self) -> None:
        """Request a stop of all ranks. Callable from any thread."""
        self._agreement.request(STOP)

    def save_is_due(self) -> None:
        """Request a save that is due by the count of steps or epochs, on every rank alike."""
        self.has_request = self.save_requested = True

    def step(self) -> None:
        """Reach a boundary between two batches, evaluations or epochs. On the training thread."""
        self._major += 1
        self._minor = 0
        self._at(self._major << _MINOR_BITS)

    def evaluation_step(self) -> None:
        """Reach the boundary before a batch of an evaluation. On the training thread."""
        self._minor = min(self._minor + 1, _END - 1)
        self._at(self._major << _MINOR_BITS | self._minor)

    def evaluation_end(self) -> None:
        """Reach the boundary after the last batch of an evaluation. On the training thread."""
        self._at(self._major << _MINOR_BITS | _END)

    def saved(self) -> None:
        self.save_requested = False
        self._timed_saves.served()
        self.has_request = self.stop_requested

    def finish(self) -> None:
        """This rank reaches no more boundaries."""
        self._agreement.finish()

    def close(self) -> None:
        self._liveness.close()
        self._agreement.close()

    def _on_remote_stop(self) -> None:
        self._stop_listener.request(ANOTHER_RANK)  # has no effect on the rank that requested it

    def _on_dead_rank(self, error: RankFailed) -> None:
        log.error("%s. All other ranks end", error)
        self._dead = error
        self._on_lost(error)

    def _at(self, completed: int) -> None:
        # Runs at every step, mostly with a cold cache: every call that is saved is a microsecond.
        if (now := _now()) >= self._poll_at:
            self._poll_at = now + _POLL_INTERVAL_S
            self._poll()
        if self._dead is not None:
            raise self._dead
        try:
            while (request := self._agreement.boundary(completed)) is not None:
                self.has_request = True
                if request.kind == STOP:
                    self.stop_requested = True
                else:
                    self.save_requested = True
        except StoreLost as error:
            if self._stop_listener.stop is not None:
                raise
            log.error("the ranks could not agree on a save: %s. Training continues without it", error)

    def _poll(self) -> None:
        self._stop_listener.reassert_signals()
        self._on_poll()
        self._timed_saves.poll()
