"""The runtime of one protected training in one process: signals, ranks, checkpoints, boundaries, shutdown.

An adapter (`adapters/loop`, `adapters/transformers`) runs the loop and calls `boundaries` between steps. Where those
have a request, it calls `save_periodically` or `stop`; the session reads from it what to save (`adapter.py`).
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import signal
import sys
import threading
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from reprieve.checkpoint.checkpointer import Checkpointer
from reprieve.checkpoint.results import Restored, Save
from reprieve.clock import Clock
from reprieve.console import show_logs
from reprieve.data.workers import signals as worker_signals
from reprieve.errors import RankFailed, RanksError, ReprieveError, StorageError
from reprieve.preemption.deadline import resolve_grace_period, take_over_wait
from reprieve.preemption.process_exit import Preempted, process_exit
from reprieve.preemption.stop_listener import StopListener
from reprieve.ranks.group import LIMIT, Ranks
from reprieve.run_state import RunState
from reprieve.session.adapter import TrainingAdapter
from reprieve.session.boundaries import Boundaries
from reprieve.session.run_reporter import RunReporter
from reprieve.session.shutdown import MARGIN_S, GracefulShutdown
from reprieve.settings import ALL, Settings
from reprieve.storage.disk import Disk
from reprieve.storage.uri import run_folder
from reprieve.units import parse_duration

log = logging.getLogger("reprieve")

_EARLY_EXIT_S = 3.0
"""How long an exit may take where there is nothing to save: releasing the folder, reporting."""

_open: weakref.WeakValueDictionary[Path, Session] = weakref.WeakValueDictionary()


class Session:
    """Shared runtime of a protected training: signals, ranks, checkpoints, shutdown."""

    def __init__(
        self,
        settings: Settings,
        *,
        adapter: TrainingAdapter,
        state: Mapping[str, Any],
        bar: bool = True,
        grace_period: str | float | timedelta | None = None,
        signals: Iterable[int | str] = (signal.SIGTERM,),
        notices: str | Sequence[str] = "auto",
        exit_wait: str | float | timedelta = "5s",
        rank_timeout: str | float | timedelta = LIMIT,
        ranks: Ranks | None = None,
        disk: Disk | None = None,
        clock: Clock | None = None,
        **checkpointer: Any,
    ) -> None:
        """`state`: what the engine saves of itself. `bar`: draw a progress bar, because nobody else does."""
        assert settings.checkpoints is not None
        process_exit.prepare()
        show_logs()
        self.settings = settings
        self.root = run_folder(settings.checkpoints, settings.drill)
        self.stopped: Preempted | None = None
        self.finished = False
        self._finished_at: int | None = None
        self.last_saved: int | None = 0
        """The step of the last checkpoint that was requested or restored. None: that save failed, or more happened
        since that belongs to the same step."""
        self._adapter = adapter
        self._exit_wait = parse_duration(exit_wait)
        self._closed = False
        self._past_beginning = threading.Event()
        """A save or the end of the run has begun, which a stop waits for."""
        # None until they are set up. A stop request or an error may come before.
        self._ranks: Ranks | None = None
        self._checkpointer: Checkpointer | None = None
        self._boundaries: Boundaries | None = None
        self._reporter: RunReporter | None = None
        self.stop_listener = StopListener(
            self._on_stop_request,
            on_request=self._report_stop_request,
            grace=resolve_grace_period(grace_period),
            signals=signals,
            kill_wait=settings.kill_wait,
            notices=notices,
            host=process_exit.host,
        )
        self._close_earlier()
        worker_signals.shield(self.stop_listener.signals)
        self.stop_listener.start()
        try:
            self._ranks = ranks = ranks if ranks is not None else Ranks.detect(parse_duration(rank_timeout))
            show_logs(ranks.rank)
            self._reporter = RunReporter(ranks.rank, ranks.world_size, settings, bar=bar)
            if self.stop_listener.stop is not None:
                self._report_stop_request()
            self._checkpointer = Checkpointer(
                self.root,
                every=settings.every,
                keep=None if settings.keep == ALL else int(settings.keep),
                name=settings.name,
                fresh=False if (request := settings.start_over()) is None else request or True,
                take_over_after=take_over_wait(settings.take_over, self.stop_listener.grace),
                ranks=ranks,
                disk=disk,
                clock=clock,
                **checkpointer,
                **state,
            )
            self._boundaries = Boundaries(
                ranks.scoped("loop"),
                self.stop_listener,
                self.checkpointer.schedule,
                self._on_lost_rank,
                self._report_step,
            )
            if self.stop_listener.stop is not None:
                self._boundaries.request_stop()
            self._shutdown = GracefulShutdown(
                self._checkpointer,
                ranks,
                self.stop_listener,
                self._exit_wait,
                self._reporter,
                save=functools.partial(self.save, background=False),
                parts=self._parts,
            )
        except BaseException as error:
            self.refused(error)
            raise
        _open[self.root] = self
        atexit.register(_close_at_exit, weakref.ref(self))

    @property
    def ranks(self) -> Ranks:
        assert self._ranks is not None
        return self._ranks

    @property
    def checkpointer(self) -> Checkpointer:
        assert self._checkpointer is not None
        return self._checkpointer

    @property
    def boundaries(self) -> Boundaries:
        assert self._boundaries is not None
        return self._boundaries

    @property
    def reporter(self) -> RunReporter:
        assert self._reporter is not None
        return self._reporter

    @property
    def closed(self) -> bool:
        return self._closed

    # Start

    def restored(self, checkpoint: Restored | None) -> None:
        """The engine has restored its state from this checkpoint. None: there is none, the run starts."""
        if checkpoint is not None:
            self.last_saved = checkpoint.step
            self.finished = checkpoint.finished is not None
            self._finished_at = checkpoint.step if self.finished else None
        self.reporter.started(
            checkpoint,
            finished=self.finished,
            checkpointer=self.checkpointer,
            handled_signals=self.stop_listener.signals if self.stop_listener.handles_signals else (),
        )

    def restored_all(self) -> None:
        """The whole state is in memory again, including what the adapter restores itself."""
        self.reporter.restored(self._parts)

    def refused(self, error: BaseException) -> None:
        """The run could not be set up: report the error and close."""
        if self._reporter is not None:
            self._reporter.refused(error)
        self.close()

    # Saving

    def save(self, *, background: bool, time_limit: timedelta | None = None) -> Save:
        """Save the current step, with what the adapter captures. `time_limit`: see `Checkpointer.save`."""
        self._past_beginning.set()
        step, began = self._adapter.position().step, time.monotonic()
        try:
            captured = self._adapter.capture()
            with self.reporter.tracker.pausing(RunState.SAVING):
                save = self.checkpointer.save(
                    step,
                    epoch=captured.epoch,
                    metrics=captured.metrics,
                    values=captured.values,
                    extra_files=captured.extra_files,
                    unrequested=captured.unrequested,
                    replace=captured.replace,
                    background=background,
                    time_limit=time_limit,
                )
        except BaseException:
            self._adapter.save_failed()
            raise
        self.last_saved = step
        self.boundaries.saved()
        self.reporter.saving(save, began)
        if time_limit is None:
            self.reporter.count(self.checkpointer)
        self._adapter.saved()
        return save

    def save_periodically(self, *, background: bool = True) -> None:
        """Run a save that is due. If storage refuses it, log an error and continue training until the next is due."""
        self.drain_save()
        try:
            self.save(background=background)
        except (StorageError, RankFailed) as error:  # RankFailed: the storage of another rank
            step = self._adapter.position().step
            log.error("step %d is not saved: %s. Training continues", step, error)
            self.checkpointer.schedule.saved(step)
            self.boundaries.saved()

    def drain_save(self) -> bool:
        """Wait for the running periodic save. Returns whether it failed: that is logged, and training continues."""
        failed = self.checkpointer.drain_save()
        if failed is not None:
            log.error("the periodic save before this one failed: %s", failed)
            self.last_saved = None
        return failed is not None

    # End

    def stop(self) -> Preempted:
        """At a boundary that all ranks have reached: save, end together. Returns the exception to raise."""
        self._past_beginning.set()
        self._report_step()
        self.stopped = self._shutdown.stop(self._adapter.position().step, self.last_saved)
        return self.stopped

    def finish(self, what: Any) -> None:
        """Training is done. Mark its last step as finished if it is saved. `what`: see `Checkpointer.mark_finished`."""
        self._past_beginning.set()
        step = self._adapter.position().step
        if step == self.last_saved:
            self.checkpointer.mark_finished(step, what)
        self.finished, self._finished_at = True, step
        self._report_step()
        self.reporter.finished(step)

    def close(self, *, together: bool = True) -> None:
        """Finish the running save and stop listening for signals."""
        if self._closed:
            return
        self._closed = True
        self._past_beginning.set()
        if self._reporter is not None and self.stopped is None:
            self._report_step()
            step = self._adapter.position().step
            # A finished run may have continued since, because more steps were requested.
            self._reporter.closing(step, finished=step == self._finished_at)
        self.stop_listener.close()
        worker_signals.unshield(self.stop_listener.signals)
        with contextlib.ExitStack() as stack:
            if self._ranks is not None:
                stack.callback(self._ranks.close)
            if self._checkpointer is not None:
                stack.callback(self._checkpointer.close, together=together)
            if self._boundaries is not None:
                stack.callback(self._boundaries.close)

    def _parts(self) -> Mapping[str, Any]:
        """The training state that a drill compares."""
        parts = self._adapter.drill_parts()
        return self.checkpointer.parts() if parts is None else parts

    # Callbacks

    def _report_step(self) -> None:
        self.reporter.step(self._adapter.position())

    def _report_stop_request(self) -> None:
        """Report the stop to the launcher before the boundary. The loop may not get there: a collective fails because
        another rank has left already. The job is preempted then, and has not failed."""
        stop = self.stop_listener.stop
        if self._reporter is not None and stop is not None:
            self._reporter.stopping(stop.reason, self._adapter.position().step)

    def _on_stop_request(self) -> None:
        stop = self.stop_listener.stop
        if stop is not None and stop.certain and (remaining_s := stop.remaining_s()) is not None:
            # In case the loop does not reach a boundary before the deadline.
            process_exit.schedule(remaining_s - MARGIN_S, why="the grace period is over:", decided=False)
        if self._boundaries is not None:
            self._boundaries.request_stop()
        self._exit_early()

    def _exit_early(self) -> None:
        """Exit without a boundary if nothing was trained. There is nothing to save then, and the first boundary may be
        far away: the process loads a checkpoint, replays data, compiles. On the stop listener's thread."""
        if self._past_beginning.wait(self._exit_wait.total_seconds()):
            return
        stop, step = self.stop_listener.stop, self.last_saved or 0
        assert stop is not None
        has_trained = self._boundaries is not None and not self._boundaries.at_first_boundary
        if has_trained or self._adapter.position().step > step:
            return
        log.warning("no step was done since the start: nothing to save, exiting now")
        process_exit.schedule(_EARLY_EXIT_S)
        with contextlib.suppress(ReprieveError):
            if self._ranks is not None:
                self._ranks.agree("exit early", limit=timedelta(seconds=_EARLY_EXIT_S / 2))
        with contextlib.suppress(ReprieveError):
            if self._checkpointer is not None:
                self._checkpointer.release()
        if self._reporter is not None:
            self._reporter.stopped(step, saved=step > 0, times={"signal": stop.at, "agreed": time.monotonic()})
        with contextlib.suppress(Exception):  # the script's own handler
            self.stop_listener.call_previous_handler()
        process_exit.exit_now()

    def _on_lost_rank(self, error: RanksError) -> None:
        """The main thread probably waits for a dead rank in a collective, so end the process. If only the store is
        lost and no stop is requested, training continues."""
        if isinstance(error, RankFailed) and self.stop_listener.stop is None:
            self.reporter.failed(error)
        if isinstance(error, RankFailed) or self.stop_listener.stop is not None:
            process_exit.schedule(self._exit_wait.total_seconds(), code=1, why=f"{error};")

    def _close_earlier(self) -> None:
        """Close an earlier session on the same folder: in a notebook a cell may run twice."""
        earlier = _open.get(self.root)
        if earlier is not None and not earlier.closed:
            log.info("closing this process's earlier run in %s: a new one begins", self.root)
            earlier.close()


def _close_at_exit(session: weakref.ref[Session]) -> None:
    if (open_session := session()) is not None:
        # In an interactive interpreter the last error may have nothing to do with this run.
        uncaught = None if hasattr(sys, "ps1") else getattr(sys, "last_value", None)
        if uncaught is not None and not open_session.closed:
            open_session.reporter.failed(uncaught)
        open_session.close(together=False)
