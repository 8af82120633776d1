"""Faults that read as scenarios: what happens to which rank, and where.

A failpoint is a name that the code passes to `reprieve.ranks.failpoints.reached`. Every `Ranks.agree(name)` has three:
"before {name}" when it begins, "publish {name}" when this rank's work is done and no other rank knows yet, "after
{name}" when the outcome is known. The code of a test may define more.
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
class _FaultAtPoint(Fault):
    """A fault that happens when the rank reaches the failpoint `at` for the n-th time."""

    at: str
    nth: int

    def happen(self) -> None:
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class _Signal(_FaultAtPoint):
    number: signal.Signals

    def happen(self) -> None:
        os.kill(os.getpid(), self.number)


@dataclass(frozen=True, slots=True)
class _Pause(_FaultAtPoint):
    duration: timedelta

    def happen(self) -> None:
        time.sleep(self.duration.total_seconds())


@dataclass(frozen=True, slots=True)
class _Fail(_FaultAtPoint):
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
    """Send SIGKILL to the rank when it reaches the failpoint `at` for the n-th time."""
    return _Signal(rank, at, nth, signal.SIGKILL)


def terminate(rank: int, at: str, *, nth: int = 1) -> Fault:
    """Send SIGTERM from the rank to itself, as a preemption at this point would."""
    return _Signal(rank, at, nth, signal.SIGTERM)


def pause(rank: int, at: str, seconds: str | float | timedelta, *, nth: int = 1) -> Fault:
    """Suspend the thread that reaches the failpoint; the other threads of the process continue."""
    return _Pause(rank, at, nth, parse_duration(seconds))


def fail(rank: int, at: str, error: Exception, *, nth: int = 1) -> Fault:
    """Raise `error` at the failpoint."""
    return _Fail(rank, at, nth, error)


def slow_disk(rank: int, bytes_per_second: str | int) -> Fault:
    """Limit the write speed of the rank's `reprieve.testing.disk()`: a number of bytes, or "50MB"."""
    return SlowDiskFault(rank, parse_size(bytes_per_second))


def full_disk(rank: int, after_bytes: str | int) -> Fault:
    """Let the rank's `reprieve.testing.disk()` be full after so many bytes."""
    return FullDiskFault(rank, parse_size(after_bytes))


def at_points(faults: Iterable[Fault]) -> Callable[[str], None]:
    """Return a function for `reprieve.ranks.failpoints.on_reached` that injects these faults, all of this rank."""
    at_failpoints = [fault for fault in faults if isinstance(fault, _FaultAtPoint)]
    counts: Counter[str] = Counter()
    lock = threading.Lock()

    def on_reached(name: str) -> None:
        with lock:
            counts[name] += 1
            count = counts[name]
        for fault in at_failpoints:
            if fault.at == name and fault.nth == count:
                fault.happen()

    return on_reached
