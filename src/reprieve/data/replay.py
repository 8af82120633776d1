"""Batches that have to be read again to get to a position, because what they come from cannot say where it is."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator
from typing import Any

log = logging.getLogger("reprieve")

_PATIENCE_S = 1.0
"""What is done in this time needs no bar."""


NO_STATE = "has no state_dict and load_state_dict (with them its position would be found at once)"


def read_again(batches: Iterator[Any], count: int, what: str, why: str = NO_STATE, unit: str = "batches") -> None:
    """Read `count` batches and drop them, or samples. Shows how far it is where somebody looks at the terminal."""
    if count:
        log.warning("%s %s: %d %s are read again to find the position", what, why, count, unit)
    began = time.monotonic()
    for done in range(count):
        if time.monotonic() - began > _PATIENCE_S:
            _with_bar(batches, count, done)
            return
        if next(batches, batches) is batches:
            return


def _with_bar(batches: Iterator[Any], count: int, done: int) -> None:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("reading data again", total=count, completed=done)
        for _ in range(done, count):
            if next(batches, batches) is batches:
                return
            bar.advance(task)
