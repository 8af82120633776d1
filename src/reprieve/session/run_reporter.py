"""What a run tells others: where it is, what is saved, how it ends.

Its launcher (`reprieve run`), if it has one, hears it from every rank. Rank 0 speaks for the run to everybody else: a
progress file, an HTTP port, a terminal, … (`progress/`).
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
from reprieve.errors import OwnershipError, RankFailed, is_permanent
from reprieve.launcher_protocol import STEP_REPORT_INTERVAL_S, Reporter
from reprieve.progress import pod
from reprieve.progress.failure_reason import reason
from reprieve.progress.publisher import Publisher
from reprieve.progress.tracker import Tracker
from reprieve.session.adapter import TrainingProgress
from reprieve.settings import NEVER, Settings
from reprieve.storage.uri import original_path, shown

log = logging.getLogger("reprieve")

Parts = Callable[[], Mapping[str, Any]]
"""The training state in memory, by name. Called only in a drill, which compares it."""


class RunReporter:
    """Of one rank."""

    def __init__(self, rank: int, world_size: int, settings: Settings, *, bar: bool) -> None:
        """`bar`: nobody else draws one."""
        # As the script says it, also where a drill writes elsewhere.
        self._folder = str(original_path(settings.checkpoints or ".", settings.drill))
        self._settings = settings
        self._bar = bar
        self._reporter = Reporter(rank, world_size)
        self._next_step = 0.0
        self._first = rank == 0
        self._publisher: Publisher | None = None
        self._reason = ""
        self.tracker = Tracker()
        """What there is to tell of the run. The adapter adds what only it knows: metrics, evaluations."""
        if self._reporter.has_launcher:
            _show_stacks_when_asked()
            self._reporter.send(launcher_protocol.Starting(checkpoints=self._folder))

    @property
    def is_drill(self) -> bool:
        """Whether `reprieve drill` compares the state at the stop with the state after the restart."""
        return self._settings.drill is not None

    def refused(self, error: BaseException) -> None:
        """The run could not be set up."""
        if is_permanent(error):
            # Who only heard of another rank's error tells that one: which of them is heard first is chance.
            cause = error.reason if isinstance(error, RankFailed) else f"{type(error).__name__}: {error}"
            self._reporter.send(launcher_protocol.Refused(error=cause))
        self.failed(error)
        # Where somebody else has the folder, what is told is theirs, perhaps in the same file.
        if self._first and self._publisher is None and not isinstance(error, OwnershipError):
            self._publisher = Publisher.from_environment(self.tracker, self._settings).start()

    def failed(self, error: BaseException) -> None:
        """It ends the run, if nothing else has."""
        self.tracker.failed(reason(error))

    def started(
        self, restored: Restored | None, *, finished: bool, checkpointer: Checkpointer, heard: Sequence[int]
    ) -> None:
        """`heard`: the signals that would be answered with a save."""
        resumed = restored.step if restored is not None else None
        if (
            restored is not None and self._first and not self._reporter.has_launcher
        ):  # the launcher prints it, if there is one
            path = restored.path
            log.warning("resuming from %s (step %d) in %s", path.name, restored.step, shown(path.parent))
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
            restarts=checkpointer.attempt - 1,
            checkpointing=bool(heard) or self._settings.every != NEVER,
            saving=functools.partial(_saving, checkpointer),
        )
        if self._first:
            found = _valid(checkpointer)
            self.tracker.checkpoints(created=len(found), valid=len(found))
            for one in found:
                if one.step == resumed:
                    self.tracker.restored(one.path, one.bytes, one.created.timestamp())
            self._publisher = Publisher.from_environment(self.tracker, self._settings, bar=self._bar).start()
            if signal.SIGTERM in heard:
                pod.say_protected()

    def restored(self, parts: Parts) -> None:
        """What was saved of these parts is in memory again."""
        if self.is_drill:
            self._reporter.send(launcher_protocol.Restored(**fingerprinted(parts)))

    def step(self, at: TrainingProgress) -> None:
        """At boundaries, 20 times a second at most. The launcher: the first at once, then a few a second."""
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
        """A save was asked for: when it is durable, that is told."""
        if save.skipped is not None:
            return

        def durable() -> None:
            took = time.monotonic() - began
            self.tracker.saved(save.path, save.bytes)
            self._reporter.send(
                launcher_protocol.Saved(step=save.step, path=str(save.path), bytes=save.bytes, began=began, took=took)
            )

        save.when_durable(durable)

    def count(self, checkpointer: Checkpointer) -> None:
        """How many checkpoints there are, once retention is through with the save that was asked for."""

        def count() -> None:
            with contextlib.suppress(OSError):
                self.tracker.checkpoints(valid=len(_valid(checkpointer)))

        if self._first:
            checkpointer.run_after_saves(count)

    def stopping(self, reason: str, step: int) -> None:
        self._reason = reason
        self._reporter.send(launcher_protocol.Stopping(reason=reason, step=step))

    def stopped(self, step: int, *, saved: bool, times: dict[str, float], **state: Any) -> None:
        """`times`: when what was done, by the monotonic clock. `state`: fingerprints of what was saved."""
        self._reporter.send(launcher_protocol.Stopped(step=step, saved=saved, times=times, **state))
        self.tracker.stopped(self._reason, saved=saved)
        self._last_word()

    def closing(self, step: int, *, finished: bool) -> None:
        """The run ends, perhaps by an error: how far it came. `finished`: there was nothing left to train."""
        if finished:
            self.tracker.finished()
        elif step:
            self._reporter.send(launcher_protocol.Step(step=step))
        self._last_word()

    def finished(self, step: int) -> None:
        self._reporter.send(launcher_protocol.Finished(step=step))
        self.tracker.finished()
        self._last_word()

    def _last_word(self) -> None:
        if self._publisher is not None:
            self._publisher.close()


def _valid(checkpointer: Checkpointer) -> list[CheckpointInfo]:
    return [one for one in checkpointer.checkpoints() if one.problem is None]


def _saving(checkpointer: Checkpointer) -> tuple[int, float | None] | None:
    """The save that is being written, and how much of it."""
    if (running := checkpointer.save_in_progress) is None:
        return None
    return running.step, running.written_bytes / running.share if running.share else None


def fingerprinted(parts: Parts) -> dict[str, Any]:
    """What a drill is told of these parts."""
    began = time.monotonic()
    found: dict[str, str] = {}
    try:
        found = fingerprints(parts())
    except Exception:  # the stop goes on, and the drill reports that nothing could be compared
        log.exception("the drill cannot compare the state in memory")
    return {"fingerprints": found, "fingerprint_s": time.monotonic() - began}


def _show_stacks_when_asked() -> None:
    """The launcher asks a job that hangs. Works while the main thread is in C code."""
    if hasattr(signal, "SIGQUIT") and signal.getsignal(signal.SIGQUIT) is signal.SIG_DFL:
        with contextlib.suppress(OSError, RuntimeError, AttributeError):  # stderr may be no file here
            faulthandler.register(signal.SIGQUIT, all_threads=True)
