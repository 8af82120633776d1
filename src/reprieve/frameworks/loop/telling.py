"""What a run tells its launcher (`reprieve run`), if it has one: where it is, what is saved, how it ends."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from reprieve.checkpoint.answers import Save
from reprieve.checkpoint.checkpointer import Checkpointer
from reprieve.errors import needs_a_person
from reprieve.progress import report
from reprieve.progress.report import STEP_EVERY_S, Reporter
from reprieve.storage.uri import DRILL


class Telling:
    """Of one rank."""

    def __init__(self, rank: int, world_size: int, folder: Path) -> None:
        """`folder`: as the script says it, also where a drill writes elsewhere."""
        self._reporter = Reporter(rank, world_size)
        self._next_step = 0.0
        if self._reporter.heard:
            _show_stacks_when_asked()
            self._reporter.tell(report.STARTING, checkpoints=str(folder))
        self._folder = folder

    def refused(self, error: BaseException) -> None:
        """The run could not be set up."""
        if needs_a_person(error):
            self._reporter.tell(report.REFUSED, error=f"{type(error).__name__}: {error}")

    def started(self, resumed: int | None, *, finished: bool, checkpointer: Checkpointer) -> None:
        self._reporter.tell(
            report.STARTED,
            checkpoints=str(self._folder),
            resumed=resumed,
            finished=finished,
            **_state_in_drill(checkpointer),
        )

    def step(self, steps: int, done: Callable[[], float | None]) -> None:
        """At boundaries: the first at once, then a few a second."""
        if self._reporter.heard and (now := time.monotonic()) >= self._next_step and steps:
            self._next_step = now + STEP_EVERY_S
            self._reporter.step(steps, done=done())

    def saving(self, save: Save, began: float) -> None:
        """A save was asked for: when it is durable, that is told."""
        if not self._reporter.heard or save.skipped is not None:
            return

        def durable() -> None:
            took = time.monotonic() - began
            self._reporter.tell(
                report.SAVED, step=save.step, path=str(save.path), bytes=save.bytes, began=began, took=took
            )

        save.when_durable(durable)

    def stopping(self, reason: str, step: int) -> None:
        self._reporter.tell(report.STOPPING, reason=reason, step=step)

    def stopped(self, step: int, *, saved: bool, times: dict[str, float], checkpointer: Checkpointer) -> None:
        """`times`: when what was done, by the monotonic clock."""
        self._reporter.tell(report.STOPPED, step=step, saved=saved, times=times, **_state_in_drill(checkpointer))

    def closing(self, step: int) -> None:
        """The run ends, perhaps by an error: how far it came."""
        if step:
            self._reporter.tell(report.STEP, step=step)

    def finished(self, step: int) -> None:
        self._reporter.tell(report.FINISHED, step=step)


def _state_in_drill(checkpointer: Checkpointer) -> dict[str, Any]:
    """`reprieve drill` compares the state at the stop with the state after the start."""
    if not os.environ.get(DRILL):
        return {}
    began = time.monotonic()
    return {"fingerprint": checkpointer.fingerprint(), "fingerprint_s": time.monotonic() - began}


def _show_stacks_when_asked() -> None:
    """The launcher asks a job that hangs. Works while the main thread is in C code."""
    if hasattr(signal, "SIGQUIT") and signal.getsignal(signal.SIGQUIT) is signal.SIG_DFL:
        with contextlib.suppress(OSError, RuntimeError, AttributeError):  # stderr may be no file here
            faulthandler.register(signal.SIGQUIT, all_threads=True)
