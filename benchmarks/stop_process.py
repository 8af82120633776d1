"""A training process that gets SIGTERM: what it records, how it is stopped, and the times that follow from both.

    the process    Notes: when steps began and ended, when the save began, when it was durable  →  a file
    from outside   stop(): starts it, waits until it trains, signals, waits for its end          →  Stopped

All times are of the monotonic clock, which all processes of a machine share.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parents[1]
BEGUN, DURABLE = "before plan", "after commit"
"""Failpoints of every save: the first thing that it does, and its return from the commit."""
_WARM_STEPS = 5
"""Steps before a process reports that it trains."""
_LOOK_S = 0.005


class Notes:
    """The events of a process, kept in memory until its end: writing a file per step would be part of the step."""

    def __init__(self, folder: Path, rank: int = 0) -> None:
        self._folder, self._rank = folder, rank
        self.steps: list[tuple[float, float]] = []
        self.moments: dict[str, float] = {}

    @contextmanager
    def step(self) -> Iterator[None]:
        began = time.monotonic()
        yield
        self.steps.append((began, time.monotonic()))
        if len(self.steps) == _WARM_STEPS:
            _trains(self._folder, self._rank).touch()

    @contextmanager
    def kept(self, **more: Any) -> Iterator[None]:
        """Record the save of the block, however it ends. Reprieve's own saves are recorded automatically."""
        from reprieve.ranks import failpoints

        failpoints.on_reached = self.at
        try:
            yield
        finally:
            failpoints.on_reached = None
            self.write(**more)

    def at(self, moment: str) -> None:
        if self.steps and moment in (BEGUN, DURABLE):
            self.moments[moment] = time.monotonic()

    def write(self, **more: Any) -> None:
        found = {"steps": self.steps, "moments": self.moments, **more}
        _notes(self._folder, self._rank).write_text(json.dumps(found))


@dataclass(frozen=True, slots=True)
class Stopped:
    """A process, or several ranks, after one SIGTERM."""

    signalled: float
    exited: float
    exit_codes: list[int | None]
    notes: list[Mapping[str, Any]]
    """The notes by rank."""

    @property
    def durable_s(self) -> float:
        """Seconds from the signal until everything is on the disk."""
        return self._last(DURABLE) - self.signalled

    @property
    def exit_s(self) -> float:
        return self.exited - self.signalled

    @property
    def reaction_ms(self) -> float:
        """Seconds from the signal to the start of the save, less the rest of the step that was running."""
        step_ended = max(_end_of_step(notes["steps"], self.signalled) for notes in self.notes)
        return 1000 * (self._last(BEGUN) - step_ended)

    @property
    def step_s(self) -> float:
        return float(median(ended - began for notes in self.notes for began, ended in notes["steps"][1:]))

    def _last(self, moment: str) -> float:
        return max(float(notes["moments"][moment]) for notes in self.notes)


def stop(
    arguments: Sequence[str], folder: Path, wait_s: float, *, env: Mapping[str, str] | None = None, limit_s: float = 300
) -> Stopped:
    """`python -m …` with these arguments, SIGTERM `wait_s` after it trains, its end. Its output goes to stderr."""
    path = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    with subprocess.Popen(
        [sys.executable, "-m", *arguments],
        cwd=ROOT,
        stdout=sys.stderr,
        env={**os.environ, "PYTHONPATH": path, **(env or {})},
    ) as process:
        try:
            wait_until_training(folder, 1, lambda: process.poll() is None, limit_s)
            time.sleep(wait_s)
            signalled = time.monotonic()
            process.send_signal(signal.SIGTERM)
            code = process.wait(limit_s)
            exited = time.monotonic()
        except BaseException:
            process.kill()
            raise
    return Stopped(signalled, exited, [code], read_notes(folder, 1))


def wait_until_training(folder: Path, ranks: int, alive: Any, limit_s: float) -> None:
    """Whether every rank has completed some steps."""
    end = time.monotonic() + limit_s
    while not all(_trains(folder, rank).exists() for rank in range(ranks)):
        if not alive() or time.monotonic() > end:
            raise RuntimeError(f"the job in {folder} does not train")
        time.sleep(_LOOK_S)


def read_notes(folder: Path, ranks: int) -> list[Mapping[str, Any]]:
    return [json.loads(_notes(folder, rank).read_text()) for rank in range(ranks)]


def _end_of_step(steps: Sequence[tuple[float, float]], moment: float) -> float:
    """The end of the step that was running at this time, or the time itself if none was."""
    return next((ended for _, ended in steps if ended >= moment), moment)


def _trains(folder: Path, rank: int) -> Path:
    return folder / f"trains-{rank}"


def _notes(folder: Path, rank: int) -> Path:
    return folder / f"notes-{rank}.json"
