"""Stops functions that save by themselves: `should_checkpoint`, and `ray.train.report` with a checkpoint.

Both calls are boundaries, which all workers reach equally often: `StepAgreement` finds one that none has passed. From
there on, `should_checkpoint` is true, and the first report in which any worker has a checkpoint is the last: it waits
until Ray has committed that checkpoint, and ends the function. Whether a stop is known when a worker happens to be in a
report decides nothing: its peers may have left that report already.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import time
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from reprieve.adapters.ray import internals
from reprieve.adapters.ray.progress import step_of
from reprieve.errors import RankFailed, RanksError
from reprieve.preemption.process_exit import Preempted, process_exit
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
UNWIND_LIMIT_S = 5.0
"""How long a worker waits for its code and for the other workers to unwind. Restarted earlier, they would be killed in
their `finally`."""
_COMMIT_POLL_S = 1.0
"""How long to wait for Ray's word of a commit before looking at the deadline again."""


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
        self._requested = False
        """`should_checkpoint` has returned true."""
        self._warned = False
        self._stopped: Preempted | None = None
        self._in_last_report = False
        self._last_step = 0
        """The step of the last report, or its number."""
        self._agreement = StepAgreement(ranks, completed=0, on_stop=lambda: worker.request_stop(ANOTHER_RANK))

    def request_stop(self) -> None:
        """Stop at the next common boundary."""
        self._agreement.request(STOP)

    def finish(self) -> None:
        """The function has ended."""
        self._agreement.finish()
        if self._due and not self._in_last_report:
            log.warning("%s", _RETURNED)
            with contextlib.suppress(RanksError):  # the others must not wait for it in their report
                self._ranks.agree("last report", _raise_ended)

    def should_checkpoint(self) -> bool:
        if self._stopped is not None:
            raise self._stopped  # the function caught it
        if not self._worker.has_session:
            self._arrive()
        self._requested = self._requested or self._due
        return self._due

    def wrap(self, original: internals.Report) -> internals.Report:
        """Replace `ray.train.report`."""

        @functools.wraps(original)
        def report(metrics: dict[str, Any], checkpoint: Any = None, *args: Any, **kwargs: Any) -> None:
            if self._stopped is not None:
                raise self._stopped
            step = step_of(metrics)
            self._last_step = self._last_step + 1 if step is None else step
            if self._worker.has_session:
                original(metrics, checkpoint, *args, **kwargs)
                return
            self._arrive()
            self._in_last_report = is_last = self._due and self._any_has_checkpoint(checkpoint is not None)
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
            log.warning("%s", _NOTHING_REPORTED if self._requested else _NEVER_CALLED)
        return False

    def _commit(self, has_checkpoint: bool) -> Preempted:
        """Wait until the controller has committed the last report. Returns the exception to raise."""
        stop = self._worker.stop
        reason = stop.reason if stop is not None else ANOTHER_RANK
        # A rank without a checkpoint has nothing to wait for, and hears of the others' below.
        path = self._wait_until_committed() if has_checkpoint else None
        began = self._worker.save_began
        commit = _Commit(
            failed=has_checkpoint and path is None,
            path=path,
            began_s_ago=None if began is None else time.monotonic() - began,
        )
        try:
            answers = self._ranks.agree("committed", lambda: dataclasses.asdict(commit), limit=_SAVE_LIMIT)
            commits = [_Commit(**answer) for answer in answers]
        except RankFailed as error:
            log.error("the checkpoint is not committed: %s", error)
            commits = [replace(commit, failed=True)]
        stopped = Preempted(
            reason,
            step=self._last_step,
            saved=not any(each.failed for each in commits),
            checkpoint=next((each.path for each in commits if each.path is not None), None),
            requested_at=time.monotonic() - max(each.began_s_ago or 0.0 for each in commits),
        )
        self._worker.stopped(stopped)
        process_exit.schedule(UNWIND_LIMIT_S)  # a `finally` may hang
        return stopped

    def _wait_until_committed(self) -> str | None:
        """Return the path of the checkpoint, or None at the deadline."""
        commit = internals.Commit()
        while True:
            stop = self._worker.stop
            remaining_s = stop.remaining_s() if stop is not None else None
            if remaining_s is not None and remaining_s <= 0:
                log.error("%s", _NOT_COMMITTED)
                return None
            timeout_s = _COMMIT_POLL_S if remaining_s is None else min(_COMMIT_POLL_S, remaining_s)
            if (path := commit.wait(timeout_s)) is not None:
                return path


@dataclass(frozen=True, slots=True, kw_only=True)
class _Commit:
    """What a worker tells the others about the commit of the last report."""

    failed: bool
    path: str | None
    """Where its checkpoint is; None: it had none in this report, or that is not committed."""
    began_s_ago: float | None
    """How long ago the save was initiated, as far as this worker knows."""


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
