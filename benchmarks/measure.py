"""How everything here is timed: all jobs in a new random order each round, each from a cold page cache, medians."""

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
"""Between jobs: virtual disks go on working for a moment after a flush or a removal."""

Extras = Mapping[str, float]


def _nothing() -> None:
    pass


@dataclass(frozen=True, slots=True)
class Job:
    """One thing to time. Only `run` is on the clock."""

    name: str
    run: Callable[[], Extras | None]
    """May return more numbers that it measured."""
    before: Callable[[], object] = _nothing
    after: Callable[[], object] = _nothing
    bytes: int = 0
    label: str = ""
    """For the table; the name where empty."""
    limit: str = ""
    """Jobs whose best time is what this one is held against: those whose names start so."""

    def key(self, what: str) -> str:
        """`save` has `save.s`, `save.first` has `save.first_s`."""
        return f"{self.name}{'.' if self.name.endswith(('save', 'restore')) else '_'}{what}"

    def is_below(self, names: Iterable[str]) -> bool:
        return any(self.name == name or self.name.startswith(f"{name}.") for name in names)


@dataclass(slots=True)
class Times:
    """What the rounds gave for one job."""

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
    """Root can, except in some containers."""
    try:
        DROP_CACHES.write_text("3\n")
    except OSError:
        return False
    return True


def settle() -> None:
    """Nothing left to write, nothing in the page cache, nothing to collect."""
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
    """Progress goes to stderr. `so_far`: what earlier rounds gave; these are added."""
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
        from rich.console import Console  # not at the top: a GPU machine need not have it
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
    """1, 2, …, as long as one more round like the longest so far would be over at `end` (of the monotonic clock)."""
    longest = 0.0
    for number in range(1, rounds + 1):
        start = time.monotonic()
        if number > 1 and start + longest > end:
            print(f"out of time after {number - 1} of {rounds} rounds", file=sys.stderr)
            return
        yield number
        longest = max(longest, time.monotonic() - start)
