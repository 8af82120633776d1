"""The progress bar, with and without a terminal."""

from __future__ import annotations

import io
import sys
import threading
from typing import Any

import pytest
from rich.console import Console

from reprieve.progress.sinks import terminal_bar
from reprieve.progress.sinks.terminal_bar import BarSink
from reprieve.progress.snapshot import Checkpoints, Progress
from tests.support.progress_kit import progress


def shown(*updates: Progress) -> str:
    screen = io.StringIO()
    sink = BarSink(Console(file=screen, force_terminal=True, width=160))
    for update in updates:
        sink.update(update)
    sink.close(updates[-1])
    return screen.getvalue()


@pytest.mark.parametrize(
    ("changes", "facts"),
    [
        ({}, "150/300  loss 0.4523  1 min 30 s left  saved checkpoint-150"),
        ({"eta_s": 7_500.0}, "150/300  loss 0.4523  2 h 05 min left  saved checkpoint-150"),
        ({"total_steps": None, "eta_s": None}, "150  loss 0.4523  saved checkpoint-150"),
        ({"loss": None, "eta_s": 12.0, "checkpoints": Checkpoints(saving=151, saving_fraction=0.42)},
         "150/300  12 s left  saving 42 %"),
        ({"loss": None, "eta_s": None, "checkpoints": Checkpoints(saving=151)}, "150/300  saving"),
        ({"loss": float("nan"), "eta_s": 0.0, "checkpoints": Checkpoints()}, "150/300  loss NaN"),
    ],
)  # fmt: skip
def test_what_the_bar_says(changes: dict[str, Any], facts: str) -> None:
    assert terminal_bar.facts(progress(**changes)) == facts
    assert facts in shown(progress(**changes))


def test_the_bar_leaves_the_streams_alone() -> None:
    streams = sys.stdout, sys.stderr
    threads = threading.active_count()
    sink = BarSink(Console(file=io.StringIO(), force_terminal=True))
    sink.update(progress())
    assert (sys.stdout, sys.stderr) == streams
    assert threading.active_count() == threads
    sink.close(progress())


def test_the_cursor_comes_back() -> None:
    updates = shown(progress(), progress(state="finished"))
    assert updates.rindex("\x1b[?25h") > updates.rindex("\x1b[?25l")


def test_no_bar_without_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stream(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert terminal_bar.terminal() is None
    monkeypatch.setattr(sys, "stderr", None)
    assert terminal_bar.terminal() is None
    monkeypatch.setattr(sys, "stderr", Stream())
    assert terminal_bar.terminal() is not None
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert terminal_bar.terminal() is None, "rich is not installed"
