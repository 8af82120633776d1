"""The end of a stop: the last save within the deadline, then all ranks leave together with 143.

All ranks are at one boundary here. What one of them knows (why, until when) all get to know; what is saved and what is
given up, rank 0 decides by the bytes and the speed of the saves before. Whatever goes wrong is said, and the
process still ends as a preempted one: the next start goes on from the newest valid checkpoint.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any

from reprieve.checkpoint.checkpointer import Checkpointer
from reprieve.console import ONE_RANK
from reprieve.errors import RanksError, ReprieveError
from reprieve.preemption.process_exit import Preempted, process_exit
from reprieve.preemption.stop_listener import ANOTHER_RANK, StopListener, StopRequest
from reprieve.ranks.group import Ranks
from reprieve.session.run_reporter import Parts, RunReporter, fingerprinted
from reprieve.units import format_size

log = logging.getLogger("reprieve")

MARGIN_S = 0.5
"""How long before the deadline we end by ourselves, so that 143 is our exit code and not a SIGKILL's."""
_ANSWER = timedelta(seconds=15)
"""How long a rank that stands at the same boundary may take to say so."""
_LOOK_S = 0.25
"""How often a running save is held against the deadline."""


class GracefulShutdown:
    """Ends this process, as one of all ranks."""

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
        """`save(time_limit=…)`: save the current step in the foreground."""
        self._checkpointer = checkpointer
        self._ranks = ranks
        self._stop_listener = stop_listener
        self._exit_wait = exit_wait
        self._reporter = reporter
        self._save = save
        self._parts = parts

    def stop(self, step: int, last_saved: int | None) -> Preempted:
        """Save what there is time for, leave together; what to raise then. `last_saved`: the step of the last
        checkpoint that was asked for."""
        self._stop_listener.request(ANOTHER_RANK)  # it may not have heard it yet
        stop = self._stop_listener.stop
        assert stop is not None
        times = {"signal": stop.at, "agreed": time.monotonic()}
        saved = False
        try:
            try:
                stop = self._agree_on_deadline(stop)
            finally:
                self._reporter.stopping(stop.reason, step)
            left = stop.left()
            if left is not None and stop.certain:
                process_exit.schedule(left, why="the grace period is over:")
            plan = self._decide(step, last_saved, left)
            saved = self._carry_out(plan, step, stop)
            times["durable"] = time.monotonic()
        except Exception as error:
            log.error(
                "step %d could not be saved: %s. The next start goes on from the newest valid checkpoint",
                step,
                error,
                exc_info=not isinstance(error, RanksError | OSError),
            )
        # Before the ranks leave: from then on the process has only seconds.
        state = fingerprinted(self._parts) if self._reporter.is_drill else {}
        self._leave(stop)
        times["left"] = time.monotonic()
        self._reporter.stopped(step, saved=saved, times=times, **state)
        return Preempted(stop.reason)

    def _agree_on_deadline(self, mine: StopRequest) -> StopRequest:
        """The earliest of all ranks', less the margin, and the reason of a rank that was stopped from outside."""

        def tell() -> dict[str, Any]:
            return {"left": mine.left(), "reason": mine.reason, "certain": mine.certain}

        told = self._ranks.agree("stop", tell, limit=_ANSWER)
        first = min(told, key=lambda one: float("inf") if one["left"] is None else one["left"])
        deadline = None if first["left"] is None else time.monotonic() + first["left"] - MARGIN_S
        reason = next((one["reason"] for one in (first, *told) if one["reason"] != ANOTHER_RANK), ANOTHER_RANK)
        return replace(mine, reason=reason, deadline=deadline, certain=first["certain"])

    def _decide(self, step: int, last_saved: int | None, left: float | None) -> Mapping[str, Any]:
        """Rank 0's decision: is the running save finished or given up, is there a new one?"""

        def decide() -> dict[str, Any]:
            running = self._checkpointer.save_in_progress
            needed = self._checkpointer.seconds_for_save()
            rest = running.remaining_s() if running is not None else 0.0
            if rest is None:
                rest = needed  # it has only just begun
            new = step != last_saved
            plan = {"abort": False, "save": new, "needed": needed, "rest": rest}
            if not new or left is None or needed is None:
                return plan
            if running is not None and (rest or 0.0) + needed > left:
                if needed <= left:
                    return plan | {"abort": True, "rest": 0.0}
                return plan | {"save": False, "dropped": True}
            return plan

        decision: Mapping[str, Any] = self._ranks.agree("last save", decide)[0]
        return decision

    def _carry_out(self, plan: Mapping[str, Any], step: int, stop: StopRequest) -> bool:
        """Is the step saved, now?"""
        left = stop.left()
        if plan["abort"]:
            log.warning("the periodic save that is running is given up: there is time for one save, of step %d", step)
            self._checkpointer.abort()
        if plan.get("dropped"):
            log.error(
                "step %d IS NOT SAVED: %.1f s are left, and a save takes about %.1f s. The save that is running, of an "
                "older step, is finished instead",
                step,
                left,
                plan["needed"],
            )
        failed = self._checkpointer.drain_save()
        if failed is not None:
            log.error("the save before this one failed: %s", failed)
        if not plan["save"] and failed is None:
            if not plan.get("dropped"):
                log.warning("%s", f"step {step} is saved already" if step else "no step was trained: nothing to save")
            return step > 0 and not plan.get("dropped")
        needed = plan["needed"]
        if needed is not None and left is not None and needed + (plan["rest"] or 0.0) > left:
            _too_short(step, needed + (plan["rest"] or 0.0), left, self._checkpointer.checkpoint_bytes)
            said = True
        else:
            said = False
        began = time.monotonic()
        with _Watching(self._checkpointer, step, stop, said=said):
            self._save(time_limit=None if left is None else timedelta(seconds=max(1.0, left)))
        took = time.monotonic() - began
        log.warning("saved step %d in %.2f s, %.2f s after %s", step, took, time.monotonic() - stop.at, stop.reason)
        return True

    def _leave(self, stop: StopRequest) -> None:
        """No rank ends before all have saved: torchrun kills the others when the first is gone."""
        left = stop.left()
        limit = self._ranks.limit if left is None else timedelta(seconds=max(1.0, left))
        try:
            self._ranks.agree("leave", limit=limit)
        except RanksError as error:
            log.warning("not all ranks came to the end: %s", error, extra=ONE_RANK)
        try:
            self._checkpointer.release()
        except ReprieveError as error:
            log.warning("the next start may have to wait a little: %s", error)
        wait = self._exit_wait.total_seconds()
        left = stop.left()
        if left is not None:
            wait = max(0.0, min(wait, left))
        process_exit.schedule(wait)
        try:
            self._stop_listener.call_previous_handler()
        except Exception:  # theirs
            log.exception("the handler that was there before ours failed")


class _Watching:
    """Looks, while the last save runs, whether it will be in time; says so at once if not."""

    def __init__(self, checkpointer: Checkpointer, step: int, stop: StopRequest, *, said: bool) -> None:
        self._checkpointer = checkpointer
        self._step = step
        self._stop = stop
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, name="reprieve last save", daemon=True)
        self._looks = stop.deadline is not None and not said

    def __enter__(self) -> None:
        if self._looks:
            self._thread.start()

    def __exit__(self, *exc: object) -> None:
        self._ended.set()

    def _look(self) -> None:
        while not self._ended.wait(_LOOK_S):
            running, left = self._checkpointer.save_in_progress, self._stop.left()
            needed = running.remaining_s() if running is not None else None
            if needed is not None and left is not None and needed > left:
                _too_short(self._step, needed, left, self._checkpointer.checkpoint_bytes)
                return


def _too_short(step: int, needed: float, left: float, size: int) -> None:
    log.error(
        "THE GRACE PERIOD IS TOO SHORT to save step %d: %s take about %.1f s, %.1f s are left. Trying anyway; if it is "
        "not done by then, the next start goes on from the checkpoint before. Use a longer grace period, save more "
        "often, or a faster disk",
        step,
        format_size(size),
        needed,
        max(0.0, left),
    )
