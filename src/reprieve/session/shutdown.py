"""The end of a stop: the last save within the deadline, then all ranks end together with 143.

All ranks are at the same boundary here. They share the reason and the deadline; rank 0 decides what is saved, by the
size of the state and the throughput of earlier saves (`stop_plan.py`). Whatever fails is logged, and the process still
exits as a preempted one: the next start resumes from the newest valid checkpoint.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta

from reprieve.checkpoint.checkpointer import Checkpointer
from reprieve.checkpoint.folder import paths
from reprieve.console import ONE_RANK
from reprieve.errors import RanksError, ReprieveError
from reprieve.preemption.process_exit import Preempted, process_exit
from reprieve.preemption.process_host import StopRequest
from reprieve.preemption.stop_listener import ANOTHER_RANK, StopListener
from reprieve.ranks.group import Ranks
from reprieve.session.run_reporter import Parts, RunReporter, fingerprinted
from reprieve.session.stop_plan import RankDeadline, StopPlan, common_deadline, plan_last_save
from reprieve.units import format_size

log = logging.getLogger("reprieve")

MARGIN_S = 0.5
"""How long before the deadline the process ends by itself, so that it exits with 143 and not by SIGKILL."""
_ANNOUNCE_TIMEOUT_S = 1.0
"""How long the stop listener's thread may take to log a request; a busy machine delays threads."""
_AGREE_TIMEOUT = timedelta(seconds=15)
"""How long a rank at the same boundary may take to report its deadline."""
_POLL_INTERVAL_S = 0.25
"""How often a running save is compared with the deadline."""


class GracefulShutdown:
    """Saves the last step and ends this process, together with all ranks."""

    def __init__(
        self,
        checkpointer: Checkpointer,
        ranks: Ranks,
        stop_listener: StopListener,
        exit_wait: timedelta,
        reporter: RunReporter,
        *,
        save: Callable[..., object],
        parts: Parts,
    ) -> None:
        """`save(time_limit=…)`: save the current step in the foreground. `parts`: what a drill compares."""
        self._checkpointer = checkpointer
        self._ranks = ranks
        self._stop_listener = stop_listener
        self._exit_wait = exit_wait
        self._reporter = reporter
        self._save = save
        self._parts = parts

    def stop(self, step: int, last_saved: int | None) -> Preempted:
        """Save what there is time for and leave together. Returns the exception to raise. `last_saved`: the step of
        the last save that was requested."""
        self._stop_listener.request(ANOTHER_RANK)  # has no effect if this rank has a request already
        self._stop_listener.wait_until_announced(_ANNOUNCE_TIMEOUT_S)
        stop = self._stop_listener.stop
        assert stop is not None
        times = {"signal": stop.at, "agreed": time.monotonic()}
        saved = False
        try:
            try:
                stop = self._agree_on_deadline(stop)
            finally:
                self._reporter.stopping(stop.reason, step)
            remaining_s = stop.remaining_s()
            if remaining_s is not None and stop.certain:
                process_exit.schedule(remaining_s, why="the grace period is over:")
            plan = self._agree_on_plan(step, last_saved, remaining_s)
            saved = self._carry_out(plan, step, stop)
            times["durable"] = time.monotonic()
        except Exception as error:
            log.error(
                "step %d could not be saved: %s. The next start resumes from the newest valid checkpoint",
                step,
                error,
                exc_info=not isinstance(error, RanksError | OSError),
            )
        # Before the ranks leave: from then on the process has only seconds.
        state = fingerprinted(self._parts) if self._reporter.is_drill else {}
        checkpoint = str(paths.checkpoint(self._checkpointer.root, step)) if saved else None
        stopped = Preempted(stop.reason, step=step, saved=saved, checkpoint=checkpoint, requested_at=stop.at)
        if process_exit.host is not None:
            process_exit.host.stopped(stopped)
        self._leave(stop)
        times["left"] = time.monotonic()
        self._reporter.stopped(step, saved=saved, times=times, **state)
        return stopped

    def _agree_on_deadline(self, stop: StopRequest) -> StopRequest:
        """Return the earliest deadline of all ranks, less the margin, with the reason from outside."""
        answers = self._ranks.agree(
            "stop",
            lambda: RankDeadline(stop.remaining_s(), stop.reason, stop.certain).to_json(),
            limit=_AGREE_TIMEOUT,
        )
        common = common_deadline([RankDeadline.from_json(answer) for answer in answers])
        deadline = None if common.remaining_s is None else time.monotonic() + common.remaining_s - MARGIN_S
        return replace(stop, reason=common.reason, deadline=deadline, certain=common.certain)

    def _agree_on_plan(self, step: int, last_saved: int | None, remaining_s: float | None) -> StopPlan:
        """Return rank 0's plan. Every rank makes one; the ranks' estimates differ, so one of them has to count."""

        def make_plan() -> dict[str, object]:
            running = self._checkpointer.save_in_progress
            return plan_last_save(
                is_new=step != last_saved,
                is_saving=running is not None,
                running_s=running.remaining_s() if running is not None else 0.0,
                save_s=self._checkpointer.seconds_for_save(),
                remaining_s=remaining_s,
            ).to_json()

        return StopPlan.from_json(self._ranks.agree("last save", make_plan)[0])

    def _carry_out(self, plan: StopPlan, step: int, stop: StopRequest) -> bool:
        """Save as planned. Returns whether the current step is saved."""
        remaining_s = stop.remaining_s()
        if plan.abort_running:
            log.warning("giving up the running periodic save: there is time for one save, of step %d", step)
            self._checkpointer.abort()
        if plan.no_time:
            log.error(
                "step %d IS NOT SAVED: %.1f s remain, and a save takes about %.1f s. Finishing the running save of an "
                "older step instead",
                step,
                remaining_s,
                plan.save_s,
            )
        failed = self._checkpointer.drain_save()
        if failed is not None:
            log.error("the save before this one failed: %s", failed)
        if not plan.save and failed is None:
            if not plan.no_time:
                log.warning("%s", f"step {step} is saved already" if step else "no step was trained: nothing to save")
            return step > 0 and not plan.no_time
        needed_s = plan.needed_s
        is_short = needed_s is not None and remaining_s is not None and needed_s > remaining_s
        if is_short:
            _log_too_short(step, needed_s, remaining_s, self._checkpointer.checkpoint_bytes)
        began = time.monotonic()
        with _DeadlineWatch(self._checkpointer, step, stop, enabled=not is_short):
            self._save(time_limit=None if remaining_s is None else timedelta(seconds=max(1.0, remaining_s)))
        took_s = time.monotonic() - began
        log.warning("saved step %d in %.2f s, %.2f s after %s", step, took_s, time.monotonic() - stop.at, stop.reason)
        return True

    def _leave(self, stop: StopRequest) -> None:
        """Wait until all ranks have saved, because torchrun kills the others when the first exits."""
        remaining_s = stop.remaining_s()
        limit = self._ranks.limit if remaining_s is None else timedelta(seconds=max(1.0, remaining_s))
        try:
            self._ranks.agree("leave", limit=limit)
        except RanksError as error:
            log.warning("not all ranks reached the end: %s", error, extra=ONE_RANK)
        try:
            self._checkpointer.release()
        except ReprieveError as error:
            log.warning("could not release the checkpoint folder, the next start may have to wait: %s", error)
        wait_s = self._exit_wait.total_seconds()
        if (remaining_s := stop.remaining_s()) is not None:
            wait_s = max(0.0, min(wait_s, remaining_s))
        process_exit.schedule(wait_s)
        try:
            self._stop_listener.call_previous_handler()
        except Exception:
            log.exception("the signal handler that the script had installed failed")


class _DeadlineWatch:
    """A thread that logs an error as soon as the last save will not be done before the deadline."""

    def __init__(self, checkpointer: Checkpointer, step: int, stop: StopRequest, *, enabled: bool) -> None:
        self._checkpointer = checkpointer
        self._step = step
        self._stop = stop
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="reprieve last save", daemon=True)
        self._enabled = enabled and stop.deadline is not None

    def __enter__(self) -> None:
        if self._enabled:
            self._thread.start()

    def __exit__(self, *exc: object) -> None:
        self._ended.set()

    def _watch(self) -> None:
        while not self._ended.wait(_POLL_INTERVAL_S):
            running, remaining_s = self._checkpointer.save_in_progress, self._stop.remaining_s()
            needed_s = running.remaining_s() if running is not None else None
            if needed_s is not None and remaining_s is not None and needed_s > remaining_s:
                _log_too_short(self._step, needed_s, remaining_s, self._checkpointer.checkpoint_bytes)
                return


def _log_too_short(step: int, needed_s: float | None, remaining_s: float | None, size: int) -> None:
    log.error(
        "THE GRACE PERIOD IS TOO SHORT to save step %d: %s take about %.1f s, %.1f s remain. Trying anyway; if the "
        "save is not done by then, the next start resumes from the checkpoint before. Use a longer grace period, save "
        "more often, or use a faster disk",
        step,
        format_size(size),
        needed_s,
        max(0.0, remaining_s or 0.0),
    )
