"""Replay: batches are read again, and dropped, to reach a position that cannot be sought."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator
from typing import Any

log = logging.getLogger("reprieve")

SHOW_BAR_AFTER_S = 1.0
"""A shorter replay shows no progress bar."""

NO_STATE = "has no state_dict and load_state_dict (with them, no data would be read again)"


def replay(batches: Iterator[Any], count: int, what: str, why: str = NO_STATE, unit: str = "batches") -> None:
    """Read and drop `count` batches, or samples. A long replay shows a progress bar, if stderr is a terminal."""
    if count:
        log.warning("%s %s: reading %d %s again to find the position", what, why, count, unit)
    began = time.monotonic()
    for done in range(count):
        if time.monotonic() - began > SHOW_BAR_AFTER_S:
            _replay_with_bar(batches, count, done)
            return
        if next(batches, batches) is batches:
            return


def _replay_with_bar(batches: Iterator[Any], count: int, done: int) -> None:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("reading data again", total=count, completed=done)
        for _ in range(done, count):
            if next(batches, batches) is batches:
                return
            bar.advance(task)
