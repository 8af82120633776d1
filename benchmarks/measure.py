"""Timing: all jobs in a new random order each round, each from a cold page cache; medians count."""

from __future__ import annotations

import gc
import os
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from statistics import median

DROP_CACHES = Path("/proc/sys/vm/drop_caches")
SETTLE_S = 0.3
"""The pause between jobs: virtual disks keep working for a moment after a flush or a removal."""

Extras = Mapping[str, float]


def _nothing() -> None:
    pass


@dataclass(frozen=True, slots=True)
class Job:
    """One job to time. Only `run` is measured."""

    name: str
    run: Callable[[], Extras | None]
    """May return more measured numbers."""
    before: Callable[[], object] = _nothing
    after: Callable[[], object] = _nothing
    bytes: int = 0
    label: str = ""
    """The label in the table; empty for the name."""
    limit: str = ""
    """The prefix of the jobs whose best time this one is compared with."""

    def key(self, what: str) -> str:
        """`save` has `save.s`, `save.first` has `save.first_s`."""
        return f"{self.name}{'.' if self.name.endswith(('save', 'restore')) else '_'}{what}"

    def is_below(self, names: Iterable[str]) -> bool:
        return any(self.name == name or self.name.startswith(f"{name}.") for name in names)


@dataclass(slots=True)
class Times:
    """The times of one job in all rounds."""

    seconds: list[float] = field(default_factory=list)
    extras: dict[str, list[float]] = field(default_factory=dict)

    @property
    def median(self) -> float:
        return median(self.seconds)

    def add(self, seconds: float, extras: Extras | None) -> None:
        self.seconds.append(seconds)
        for name, value in (extras or {}).items():
            self.extras.setdefault(name, []).append(value)


@cache
def can_drop_caches() -> bool:
    """Whether this process can: root can, except in some containers."""
    try:
        DROP_CACHES.write_text("3\n")
    except OSError:
        return False
    return True


def settle() -> None:
    """Leave nothing to write, nothing in the page cache, nothing to collect."""
    gc.collect()
    os.sync()
    if can_drop_caches():
        DROP_CACHES.write_text("3\n")
    time.sleep(SETTLE_S)


def run_once(job: Job) -> tuple[float, Extras | None]:
    job.before()
    settle()
    start = time.perf_counter()
    extras = job.run()
    seconds = time.perf_counter() - start
    job.after()
    return seconds, extras


def measure(
    jobs: list[Job], rounds: int, *, seed: int | None = None, so_far: dict[str, Times] | None = None
) -> dict[str, Times]:
    """Time the jobs; progress goes to stderr. `so_far`: the times of earlier rounds, to add to."""
    times = {job.name: Times() for job in jobs} if so_far is None else so_far
    order = random.Random(seed)
    with _Progress(len(jobs) * rounds) as said:
        for number in range(1, rounds + 1):
            for job in order.sample(jobs, len(jobs)):
                said(job.name)
                seconds, extras = run_once(job)
                times[job.name].add(seconds, extras)
                said(job.name, f"round {number}/{rounds}  {job.name:32} {seconds:8.3f} s")
    return times


class _Progress:
    """A bar on stderr, and a line for each job that is done."""

    def __init__(self, total: int) -> None:
        from rich.console import Console  # not at the top: a GPU machine may lack it
        from rich.progress import Progress

        self._bar = Progress(console=Console(stderr=True))
        self._task = self._bar.add_task("", total=total)

    def __enter__(self) -> _Progress:
        self._bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._bar.stop()

    def __call__(self, doing: str, done: str | None = None) -> None:
        self._bar.update(self._task, description=doing, advance=0 if done is None else 1)
        if done is not None:
            self._bar.console.print(done, highlight=False)


def rounds_in_time(rounds: int, end: float) -> Iterator[int]:
    """Yield 1, 2, … as long as one more round like the longest so far would end before `end` (monotonic clock)."""
    longest = 0.0
    for number in range(1, rounds + 1):
        start = time.monotonic()
        if number > 1 and start + longest > end:
            print(f"out of time after {number - 1} of {rounds} rounds", file=sys.stderr)
            return
        yield number
        longest = max(longest, time.monotonic() - start)
