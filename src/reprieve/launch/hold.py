"""`reprieve hold`: an idle first process of a container, whose training people start with `kubectl exec`.

    SIGTERM ──► to every process of the container ──► they save and exit ──► 143, at the latest at the deadline

What `kubectl exec` starts is no descendant of the first process, and the kubelet signals only that one. So this one
signals all others. It does so once: what they start afterwards may belong to their saves.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from reprieve import exit_codes
from reprieve.errors import ConfigError
from reprieve.launch.attempt import KILL_MARGIN_S, STOP_SIGNALS, SignalReceiver
from reprieve.launch.messages import print_exit_message, print_message
from reprieve.launch.process import Process, other_processes
from reprieve.preemption.deadline import Grace
from reprieve.run_state import RunState

_STOP_SIGNALS = (*STOP_SIGNALS, signal.SIGINT)
_POLL_INTERVAL_S = 0.05
_MOST_NAMES = 8
"""How many processes a message names."""


@dataclass(frozen=True, slots=True)
class Hold:
    """Holds a container until it is stopped."""

    grace_period: Grace

    def run(self) -> int:
        """Wait for a stop signal, pass it on, wait for the other processes, and return the exit code."""
        _check_first_process()
        with SignalReceiver() as signals:
            print_message(f"ready for commands by kubectl exec; grace period: {self.grace_period}")
            reason = _wait_for_stop(signals)
            give_up_at = self._deadline()
            signalled = _pass_on_sigterm()
            print_message(f"{reason}, passed on to {_names(signalled)}")
            left = _wait_for_ends(signals, give_up_at)
        outcome = f"{_names(left)} did not end within the grace period" if left else "nothing runs any more"
        print_exit_message(f"stopped by {reason}: {outcome}", RunState.PREEMPTED)
        return exit_codes.PREEMPTED

    def _deadline(self) -> float | None:
        """None: as long as it takes. A default of the platform may not be this pod's, and would cut off a save."""
        if self.grace_period.period is None or not self.grace_period.certain:
            return None
        return time.monotonic() + self.grace_period.period.total_seconds() - KILL_MARGIN_S


def _check_first_process() -> None:
    """Raise ConfigError where the signal would reach processes of other containers, or of the whole machine."""
    if os.getpid() == 1 and Path("/proc/self").readlink() == Path("1"):
        return
    raise ConfigError(
        f"`reprieve hold` has to be the first process of a container, and this is process {os.getpid()}: it passes "
        'SIGTERM on to all others. In the pod: command: ["reprieve", "hold"], without shareProcessNamespace'
    )


def _wait_for_stop(signals: SignalReceiver) -> str:
    """Reap orphans until a stop signal arrives, and return its name."""
    while True:
        select.select([signals.reader], [], [])
        received = signals.read()
        _reap()
        for number in received:
            if number in _STOP_SIGNALS:
                return signal.Signals(number).name


def _pass_on_sigterm() -> list[Process]:
    """Send SIGTERM to all other processes, and return them."""
    found = other_processes()
    for number in (signal.SIGTERM, signal.SIGCONT):  # a suspended process handles nothing
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(-1, number)  # all but this one, and no process that is being started escapes
    return found


def _wait_for_ends(signals: SignalReceiver, give_up_at: float | None) -> list[Process]:
    """Wait until all other processes have ended, and return those that have not when the time is over.

    An idle shell of `kubectl exec -it` ignores SIGTERM, and has nothing to save: it is not waited for.
    """
    while left := [process for process in other_processes() if not process.is_idle_shell]:
        if give_up_at is not None and time.monotonic() >= give_up_at:
            return left
        select.select([signals.reader], [], [], _POLL_INTERVAL_S)
        signals.read()
        _reap()
    return []


def _reap() -> None:
    """Reap orphans, which are children of the first process."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _names(processes: Iterable[Process]) -> str:
    """Names of programs: command lines may contain secrets."""
    names = [f"{process.name} ({process.pid})" for process in processes]
    more = [f"{len(names) - _MOST_NAMES} more"] if len(names) > _MOST_NAMES else []
    return ", ".join([*names[:_MOST_NAMES], *more]) or "no process"
