"""Reports of a run: where it is, what is saved, how it ends.

Every rank reports to the launcher (`reprieve run`), if there is one. Rank 0 publishes the run's progress to all other
sinks: a progress file, an HTTP port, a terminal, … (`progress/`). The session calls the methods in this order:
started → restored → step, saving, … → stopping → stopped, or finished, or closing.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import logging
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from reprieve import launcher_protocol
from reprieve.checkpoint.checkpointer import Checkpointer
from reprieve.checkpoint.folder.catalog import CheckpointInfo
from reprieve.checkpoint.results import Restored, Save
from reprieve.checkpoint.state.fingerprint import fingerprints
from reprieve.errors import OwnershipError, is_permanent
from reprieve.launcher_protocol import STEP_REPORT_INTERVAL_S, Reporter
from reprieve.progress import pod
from reprieve.progress.failure_reason import reason, whole_reason
from reprieve.progress.publisher import Publisher
from reprieve.progress.sinks import termination_log
from reprieve.progress.snapshot import ListedCheckpoint
from reprieve.progress.tracker import Tracker
from reprieve.session.adapter import TrainingProgress
from reprieve.settings import NEVER, Settings
from reprieve.storage.uri import display_path, original_path

log = logging.getLogger("reprieve")

Parts = Callable[[], Mapping[str, Any]]
"""The training state in memory, by name. Called only in a drill, which compares it."""


class RunReporter:
    """The reporter of one rank."""

    def __init__(self, rank: int, world_size: int, settings: Settings, *, bar: bool) -> None:
        """`bar`: draw a progress bar, because nobody else does."""
        # The folder that the script names, also where a drill writes elsewhere.
        self._folder = str(original_path(settings.checkpoints or ".", settings.drill))
        self._settings = settings
        self._bar = bar
        self._reporter = Reporter(rank, world_size)
        self._next_step = 0.0
        self._is_first_rank = rank == 0
        self._publisher: Publisher | None = None
        self._reason = ""
        self.tracker = Tracker()
        """The progress of the run. The adapter adds what only it knows: metrics, evaluations."""
        if self._reporter.has_launcher:
            _show_stacks_on_sigquit()
            self._reporter.send(launcher_protocol.Starting(checkpoints=self._folder))

    @property
    def is_drill(self) -> bool:
        """Whether `reprieve drill` compares the state at the stop with the state after the restart."""
        return self._settings.drill is not None

    def refused(self, error: BaseException) -> None:
        """Report that the run could not be set up."""
        if is_permanent(error):
            # Report the original error on every rank: the launcher shows the first that arrives.
            self._reporter.send(launcher_protocol.Refused(error=whole_reason(error)))
        self.failed(error)
        if self._is_first_rank and self._publisher is None:
            if isinstance(error, OwnershipError):
                self._publish_to_termination_log()
            else:
                self._publisher = Publisher.from_environment(self.tracker, self._settings).start()

    def failed(self, error: BaseException) -> None:
        """Record the error that ends the run, unless it has ended already."""
        self.tracker.failed(reason(error))

    def started(
        self, restored: Restored | None, *, finished: bool, checkpointer: Checkpointer, handled_signals: Sequence[int]
    ) -> None:
        """Report the start or the resume. `handled_signals`: the signals that the run answers with a save."""
        resumed = restored.step if restored is not None else None
        # A launcher prints this itself.
        if restored is not None and self._is_first_rank and not self._reporter.has_launcher:
            path = restored.path
            log.warning("resuming from %s (step %d) in %s", path.name, restored.step, display_path(path.parent))
        self._reporter.send(
            launcher_protocol.Started(
                checkpoints=self._folder,
                checkpoint=str(restored.path) if restored is not None else None,
                resumed=resumed,
                finished=finished,
            )
        )
        self.tracker = Tracker(
            resumed_from=resumed,
            run=checkpointer.run_name,
            restarts=checkpointer.attempt - 1,
            checkpointing=bool(handled_signals) or self._settings.every != NEVER,
            saving=functools.partial(_save_progress, checkpointer),
        )
        if self._is_first_rank:
            self.tracker.checkpoints(created=checkpointer.checkpoints_created)
            for checkpoint in self._list_checkpoints(checkpointer):
                if checkpoint.step == resumed and checkpoint.problem is None:
                    self.tracker.restored(checkpoint.path, checkpoint.bytes, checkpoint.created.timestamp())
            self._publisher = Publisher.from_environment(self.tracker, self._settings, bar=self._bar).start()
        if signal.SIGTERM in handled_signals:
            pod.print_protected()

    def restored(self, parts: Parts) -> None:
        """In a drill, report fingerprints of these parts, which are in memory again."""
        if self.is_drill:
            self._reporter.send(launcher_protocol.Restored(**fingerprinted(parts)))

    def step(self, at: TrainingProgress) -> None:
        """Publish the position, at boundaries, at most 20 times a second. The launcher gets a few a second."""
        if at.metrics:
            self.tracker.metrics(at.metrics)
        self.tracker.plan(at.total_steps, at.total_epochs)
        self.tracker.trained_on(at.samples, at.tokens)
        if at.step != self.tracker.at:
            self.tracker.step(at.step, at.epoch)
        if self._reporter.has_launcher and (now := time.monotonic()) >= self._next_step and at.step:
            self._next_step = now + STEP_REPORT_INTERVAL_S
            step = launcher_protocol.Step(step=at.step, done=at.fraction, eta_s=self.tracker.eta_s())
            self._reporter.send(step, wait=False)

    def saving(self, save: Save, began: float) -> None:
        """Report a save once it is durable."""
        if save.skipped is not None:
            return

        def durable() -> None:
            took = time.monotonic() - began
            self.tracker.saved(save.path, save.bytes, step=save.step, took_s=took)
            self._reporter.send(
                launcher_protocol.Saved(step=save.step, path=str(save.path), bytes=save.bytes, began=began, took=took)
            )

        save.when_durable(durable)

    def count(self, checkpointer: Checkpointer) -> None:
        """Publish what is in the folder, once retention has run after the latest save."""

        def count() -> None:
            with contextlib.suppress(OSError):
                self._list_checkpoints(checkpointer)

        if self._is_first_rank:
            checkpointer.run_after_saves(count)

    def stopping(self, reason: str, step: int) -> None:
        self._reason = reason
        self._reporter.send(launcher_protocol.Stopping(reason=reason, step=step))

    def stopped(self, step: int, *, saved: bool, times: dict[str, float], **state: Any) -> None:
        """Report the end of a stop. `times`: monotonic times of its phases. `state`: fingerprints of what was saved."""
        self._reporter.send(launcher_protocol.Stopped(step=step, saved=saved, times=times, **state))
        self.tracker.stopped(self._reason, saved=saved)
        if self._is_first_rank and self._publisher is None:
            self._publish_to_termination_log()
        self._close_publisher()

    def closing(self, step: int, *, finished: bool) -> None:
        """Report how far the run came; it may end by an error. `finished`: nothing is left to train."""
        if finished:
            self.tracker.finished()
        elif step:
            self._reporter.send(launcher_protocol.Step(step=step))
        self._close_publisher()

    def finished(self, step: int) -> None:
        self._reporter.send(launcher_protocol.Finished(step=step))
        self.tracker.finished()
        self._close_publisher()

    def _list_checkpoints(self, checkpointer: Checkpointer) -> list[CheckpointInfo]:
        """Publish what is in the folder, and return it."""
        found = checkpointer.checkpoints()
        self.tracker.checkpoints(
            valid=sum(each.problem is None for each in found),
            listed=[
                ListedCheckpoint(
                    path=str(each.path),
                    step=each.step,
                    created_at=each.created.timestamp(),
                    bytes=each.bytes,
                    problem=each.problem,
                    epoch=each.manifest.epoch if each.manifest is not None else None,
                )
                for each in found
            ],
        )
        return found

    def _publish_to_termination_log(self) -> None:
        """Publish the end to the sink of this container alone: another run, or an earlier attempt of this one, may hold
        the folder and publish to the same progress file."""
        if (log := termination_log.path()).exists() and not self.is_drill:
            self._publisher = Publisher(self.tracker, [termination_log.TerminationSink(log)]).start()

    def _close_publisher(self) -> None:
        if self._publisher is not None:
            self._publisher.close()


def _save_progress(checkpointer: Checkpointer) -> tuple[int, float | None] | None:
    """Return the step of the running save and the share that is written."""
    if (running := checkpointer.save_in_progress) is None:
        return None
    return running.step, running.written_bytes / running.share if running.share else None


def fingerprinted(parts: Parts) -> dict[str, Any]:
    """Return the fields of a drill report about these parts."""
    began = time.monotonic()
    found: dict[str, str] = {}
    try:
        found = fingerprints(parts())
    except Exception:  # the stop continues; the drill reports that nothing could be compared
        log.exception("the drill cannot compare the state in memory")
    return {"fingerprints": found, "fingerprint_s": time.monotonic() - began}


def _show_stacks_on_sigquit() -> None:
    """The launcher sends SIGQUIT to a job that hangs. faulthandler works while the main thread is in C code."""
    if hasattr(signal, "SIGQUIT") and signal.getsignal(signal.SIGQUIT) is signal.SIG_DFL:
        with contextlib.suppress(OSError, RuntimeError, AttributeError):  # stderr may not be a file
            faulthandler.register(signal.SIGQUIT, all_threads=True)
