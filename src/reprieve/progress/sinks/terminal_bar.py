"""A progress bar on a terminal: step, loss, time left, the newest checkpoint, and the save in progress.

It is drawn by the thread that updates the sink. It has no thread of its own and does not replace stdout and stderr: a
forked worker that printed through rich would wait forever for a lock that its parent held.
"""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Any

from reprieve.progress.formats import progress_json
from reprieve.progress.snapshot import Progress
from reprieve.run_state import RunState
from reprieve.units import format_duration

if TYPE_CHECKING:
    from rich.console import Console


def terminal() -> Console | None:
    """Return a console on stderr if stderr is a terminal and rich is installed."""
    try:
        if not sys.stderr.isatty():
            return None
        from rich.console import Console
    except (ImportError, AttributeError, ValueError):  # stderr may be closed, or None
        return None
    return Console(stderr=True)


class BarSink:
    """The progress bar of one run."""

    every_s = 0.5
    name = "the progress bar"

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar: Any = None
        self._task: Any = None

    def update(self, progress: Progress) -> None:
        try:
            self._draw(progress)
        except BaseException:
            with contextlib.suppress(Exception):
                self._bar.stop()
            self._bar = None  # half drawn; the next call creates a new bar
            raise

    def _draw(self, progress: Progress) -> None:
        if self._bar is None:
            self._open()
        self._bar.update(
            self._task,
            total=progress.total_steps,
            completed=progress.total_steps if progress.state == RunState.FINISHED else progress.step,
            description=str(progress.state),
            facts=facts(progress),
        )
        if self._bar.live.is_started:
            self._bar.refresh()
        else:
            self._bar.start()

    def close(self, progress: Progress) -> None:
        if self._bar is not None:
            self.update(progress)
            self._bar.stop()

    def _open(self) -> None:
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as Bar

        self._bar = Bar(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[facts]}", markup=False),
            console=self._console,
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._task = self._bar.add_task("", total=None, facts="")


def facts(progress: Progress) -> str:
    """Return the text behind the bar: `120/400  loss 0.4523  3 min 20 s left  saved checkpoint-100  saving 42 %`."""
    total = "" if progress.total_steps is None else f"/{progress.total_steps}"
    parts = [f"{progress.step}{total}"]
    if progress.loss is not None:
        parts.append(f"loss {progress_json.text(progress.loss, 4)}")
    if progress.eta_s:
        parts.append(f"{format_duration(int(progress.eta_s))} left")
    if progress.checkpoints.latest:
        parts.append(f"saved {progress.checkpoints.latest.rstrip('/').rpartition('/')[2]}")
    if progress.checkpoints.saving is not None:
        fraction = progress.checkpoints.saving_fraction
        parts.append("saving" if fraction is None else f"saving {100 * fraction:.0f} %")
    return "  ".join(parts)
