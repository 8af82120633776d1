"""Stops functions that save by themselves: `should_checkpoint`, and `ray.train.report` with a checkpoint.

Both calls are boundaries, which all workers reach equally often: `StepAgreement` finds one that none has passed. From
there on, `should_checkpoint` is true, and the first report in which any worker has a checkpoint is the last: it waits
until Ray has committed that checkpoint, and ends the function. Whether a stop is known when a worker happens to be in a
report decides nothing: its peers may have left that report already.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from reprieve.adapters.ray import internals
from reprieve.adapters.ray.progress import STEP_NAMES
from reprieve.errors import RankFailed, RanksError
from reprieve.preemption.process_exit import Preempted
from reprieve.preemption.stop_listener import ANOTHER_RANK
from reprieve.ranks.group import LIMIT, Ranks
from reprieve.ranks.step_agreement import StepAgreement
from reprieve.ranks.step_protocol import STOP

if TYPE_CHECKING:
    from reprieve.adapters.ray.worker import RayWorker

log = logging.getLogger("reprieve")

_ARRIVAL_LIMIT = LIMIT
"""How much later than the first a worker may reach the boundary of a stop."""
_SAVE_LIMIT = timedelta(days=1)
"""How much later than the first a worker may reach the last report, and commit it: one may save for all. If that one
dies, Ray ends the others, and so does a deadline."""
_COMMIT_POLL_S = 5.0


class ReportedCheckpoints:
    """The boundaries of one worker whose function saves by itself."""

    def __init__(self, ranks: Ranks, worker: RayWorker) -> None:
        self._ranks = ranks
        self._worker = worker
        self._boundaries = 0
        self._due = False
        """A stop is agreed, and all workers have reached its boundary."""
        self._failed = False
        """The workers could not stop together, and try no more."""
        self._told = False
        """`should_checkpoint` has returned true."""
        self._warned = False
        self._stopped: Preempted | None = None
        self._last_step = 0
        """The step of the last report, or its number."""
        self.committed: str | None = None
        """The path of the checkpoint that ended the function."""
        self._agreement = StepAgreement(ranks, completed=0, on_stop=lambda: worker.request_stop(ANOTHER_RANK))

    def request_stop(self) -> None:
        """Stop at the next common boundary."""
        self._agreement.request(STOP)

    def finish(self) -> None:
        """The function has ended."""
        self._agreement.finish()
        if self._due and self._stopped is None:
            log.warning("%s", _RETURNED)
            with contextlib.suppress(RanksError):  # the others must not wait for it in their report
                self._ranks.agree("last report", _raise_ended)

    def should_checkpoint(self) -> bool:
        if self._stopped is not None:
            raise self._stopped  # the function caught it
        if not self._worker.has_session:
            self._arrive()
        self._told = self._told or self._due
        return self._due

    def wrap(self, original: internals.Report) -> internals.Report:
        """Replace `ray.train.report`."""

        @functools.wraps(original)
        def report(metrics: dict[str, Any], checkpoint: Any = None, *args: Any, **kwargs: Any) -> None:
            if self._stopped is not None:
                raise self._stopped
            self._last_step = next((metrics[name] for name in STEP_NAMES if name in metrics), self._last_step + 1)
            if self._worker.has_session:
                original(metrics, checkpoint, *args, **kwargs)
                return
            self._arrive()
            is_last = self._due and self._any_has_checkpoint(checkpoint is not None)
            original(metrics, checkpoint, *args, **kwargs)
            if is_last:
                self._stopped = self._commit(checkpoint is not None)
                raise self._stopped

        return report

    def _arrive(self) -> None:
        """Reach a boundary."""
        if self._due or self._failed:
            return
        self._boundaries += 1
        try:
            if self._agreement.boundary(self._boundaries) is not None:
                self._ranks.agree("stop", limit=_ARRIVAL_LIMIT)
                self._due = True
        except RankFailed as error:
            self._failed = True
            log.error(
                "the workers could not stop together: %s. Call should_checkpoint() on every worker, equally often. "
                "Training continues until the deadline",
                error,
            )

    def _any_has_checkpoint(self, has_checkpoint: bool) -> bool:
        """Return whether any worker has a checkpoint in this report. All workers are in it."""
        if any(self._ranks.agree("last report", lambda: has_checkpoint, limit=_SAVE_LIMIT)):
            return True
        if not self._warned:
            self._warned = True
            log.warning("%s", _NOTHING_REPORTED if self._told else _NEVER_CALLED)
        return False

    def _commit(self, has_checkpoint: bool) -> Preempted:
        """Wait until the controller has committed the last report. Returns the exception to raise."""
        stop = self._worker.stop
        reason = stop.reason if stop is not None else ANOTHER_RANK
        # A rank without a checkpoint has nothing to wait for, and hears of the others' below.
        committed = self._wait_until_committed() if has_checkpoint else True
        try:
            saved = all(self._ranks.agree("committed", lambda: committed, limit=_SAVE_LIMIT))
        except RankFailed as error:
            log.error("the checkpoint is not committed: %s", error)
            saved = False
        return Preempted(reason, step=self._last_step, saved=saved, checkpoint=self.committed)

    def _wait_until_committed(self) -> bool:
        while True:
            stop = self._worker.stop
            remaining_s = stop.remaining_s() if stop is not None else None
            if remaining_s is not None and remaining_s <= 0:
                log.error("%s", _NOT_COMMITTED)
                return False
            began = time.monotonic()
            path = internals.reported_checkpoint()
            timeout_s = _COMMIT_POLL_S if remaining_s is None else min(_COMMIT_POLL_S, remaining_s)
            if path is not None and internals.is_committed(path, timeout_s):
                self.committed = path
                return True
            time.sleep(max(0.0, 0.05 - (time.monotonic() - began)))


def _raise_ended() -> bool:
    raise RanksError("its training function ended without a report after should_checkpoint() was true")


_NOT_COMMITTED = "Ray has not committed the checkpoint before the deadline: the next start resumes from the one before"
_NOTHING_REPORTED = (
    "should_checkpoint() was true, and no worker reported a checkpoint: nothing is saved yet. Training continues until "
    "the next report with one, or until the deadline"
)
_RETURNED = (
    "the training function ended without a report after should_checkpoint() was true. If it returned, Ray takes the "
    "run for finished: report a checkpoint instead"
)
_NEVER_CALLED = (
    "this training function does not save at a stop request: it continues until it reports a checkpoint, or until the "
    "deadline. Save where reprieve.ray.should_checkpoint() is true, or use reprieve.ray.Run"
)
