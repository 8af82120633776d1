"""Faults, said as scenarios: what happens to which rank, where or when.

A point is a name that the code passes to `reprieve.failpoints.reached`. Every `Ranks.agree(name)` has three: "before
{name}" when it begins, "publish {name}" when the rank's own work is done and nobody knows yet, "after {name}" when the
outcome is known. A test's own code may name more.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta

from reprieve.units import parse_duration, parse_size


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that happens to one rank."""

    rank: int


@dataclass(frozen=True, slots=True)
class _AtPoint(Fault):
    at: str
    nth: int

    def happen(self) -> None:
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class _Signal(_AtPoint):
    number: signal.Signals

    def happen(self) -> None:
        os.kill(os.getpid(), self.number)


@dataclass(frozen=True, slots=True)
class _Pause(_AtPoint):
    length: timedelta

    def happen(self) -> None:
        time.sleep(self.length.total_seconds())


@dataclass(frozen=True, slots=True)
class _Fail(_AtPoint):
    error: Exception

    def happen(self) -> None:
        raise self.error


@dataclass(frozen=True, slots=True)
class SlowDiskFault(Fault):
    bytes_per_second: int


@dataclass(frozen=True, slots=True)
class FullDiskFault(Fault):
    after_bytes: int


def kill(rank: int, at: str, *, nth: int = 1) -> Fault:
    """SIGKILL, when the rank reaches the point `at` for the n-th time."""
    return _Signal(rank, at, nth, signal.SIGKILL)


def terminate(rank: int, at: str, *, nth: int = 1) -> Fault:
    """SIGTERM, from the rank to itself, as a preemption would at this moment."""
    return _Signal(rank, at, nth, signal.SIGTERM)


def pause(rank: int, at: str, seconds: str | float | timedelta, *, nth: int = 1) -> Fault:
    """The thread that reaches the point stands still; the other threads of the process go on."""
    return _Pause(rank, at, nth, parse_duration(seconds))


def fail(rank: int, at: str, error: Exception, *, nth: int = 1) -> Fault:
    """`error` is raised at the point."""
    return _Fail(rank, at, nth, error)


def slow_disk(rank: int, bytes_per_second: str | int) -> Fault:
    """The rank's `reprieve.testing.disk()` writes no faster than this: a number of bytes, or "50MB"."""
    return SlowDiskFault(rank, parse_size(bytes_per_second))


def full_disk(rank: int, after_bytes: str | int) -> Fault:
    """The rank's `reprieve.testing.disk()` is full after so many bytes."""
    return FullDiskFault(rank, parse_size(after_bytes))


def at_points(faults: Iterable[Fault]) -> Callable[[str], None]:
    """What `reprieve.failpoints.on_reached` does under these faults, all of this rank."""
    planned = [fault for fault in faults if isinstance(fault, _AtPoint)]
    times: Counter[str] = Counter()
    lock = threading.Lock()

    def on_reached(name: str) -> None:
        with lock:
            times[name] += 1
            count = times[name]
        for fault in planned:
            if fault.at == name and fault.nth == count:
                fault.happen()

    return on_reached
