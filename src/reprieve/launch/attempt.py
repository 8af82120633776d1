"""One start of the command, until nothing of it runs any more.

A loop over events: signals to the launcher, reports of the ranks, the exit of the child, deadlines.

    stop request ──► SIGTERM to child and ranks ──► they save and exit ──► or are killed at the deadline

SIGTERM goes to the child, as the init process of a container would send it, and to every rank that has reported:
processes in between, such as a shell or `accelerate launch`, may not forward signals. Before the first report it goes
to the child's process group.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from enum import Enum, auto
from types import FrameType
from typing import Any

from reprieve.launch.command import Command
from reprieve.launch.memory_kills import count_memory_kills
from reprieve.launch.output_relay import OutputLog, OutputRelay
from reprieve.launch.process import Child
from reprieve.launch.rank_status import JobStatus
from reprieve.launch.runs.outcome import AttemptResult
from reprieve.launcher_protocol import Listener, Pause, Report

log = logging.getLogger("reprieve")

STOP_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
"""SIGHUP: a closed terminal stops a run as a preemption does."""
_FORWARDED_SIGNALS = (signal.SIGINT, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT)
KILL_MARGIN_S = 0.25
"""How long before the deadline to kill what still runs, so that the launcher exits in time. Ranks exit 0.5 s before."""
_POLL_INTERVAL_S = 1.0
_LEFTOVERS_TIMEOUT_S = 2.0
"""How long processes that the child leaves behind may take to end after SIGTERM."""
_ORPHANS_TIMEOUT_S = 30.0
"""The same for ranks, which save. Kubernetes' default grace period, where none is known."""
_END_TIMEOUT_S = 10.0
"""How long a job that hangs or cannot start may take to end after SIGTERM: a rank may still report the reason."""
_REFUSED_WAIT_S = 2.0
"""How long the command may take to end by itself after a rank has reported a permanent failure."""
_STACKS_WAIT_S = 1.0
_OUTPUT_TIMEOUT_S = 2.0


class SignalReceiver:
    """Receives the launcher's signals from the start on, so that none is lost between two attempts."""

    def __init__(self) -> None:
        self.reader, self._writer = socket.socketpair()
        self.reader.setblocking(False)
        self._writer.setblocking(False)
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> SignalReceiver:
        signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        for number in (*STOP_SIGNALS, *_FORWARDED_SIGNALS, signal.SIGCHLD, signal.SIGWINCH):
            self._previous[number] = signal.signal(number, _ignore)
        return self

    def __exit__(self, *exc: object) -> None:
        signal.set_wakeup_fd(-1)
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self.reader.close()
        self._writer.close()

    def read(self) -> list[int]:
        try:
            return list(self.reader.recv(4096))
        except BlockingIOError:
            return []


def _ignore(number: int, frame: FrameType | None) -> None:
    """The wake-up descriptor passes on the number."""


@dataclass(slots=True)
class AttemptStop:
    """Why and since when the launcher stops its attempt. The run can be resumed later."""

    reason: str
    at: float
    """When it was made, by the monotonic clock."""
    paused: bool = False


class Phase(Enum):
    """What the attempt is doing."""

    RUNNING = auto()
    REFUSED = auto()
    """A rank reported a permanent failure; the command has a moment to end by itself."""
    ENDING = auto()
    """The command did not end by itself after a permanent failure, and got SIGTERM."""
    STOPPING = auto()
    """There is a stop request."""
    ORPHANED = auto()
    """The child exited, but ranks still run: they got SIGTERM."""
    HUNG = auto()
    """No rank completed a step for too long; the job got SIGTERM."""


@dataclass(slots=True)
class Attempt:
    """Runs the command once."""

    command: Command
    environment: Mapping[str, str]
    signals: SignalReceiver
    listener: Listener
    output_log: OutputLog
    grace_period: timedelta | None
    hang_timeout: timedelta | None
    on_change: Callable[[Attempt], None]
    """Called after every event, and every second."""
    output: tuple[int, int] = (1, 2)
    """The descriptors that the command's stdout and stderr are relayed to."""
    status: JobStatus = field(default_factory=JobStatus)
    stop: AttemptStop | None = None
    hung_s: float | None = None
    killed: bool = False
    child: Child = field(init=False)
    _relays: list[OutputRelay] = field(init=False, default_factory=list)
    _phase: Phase = field(init=False, default=Phase.RUNNING)
    _kill_at: float | None = field(init=False, default=None)
    """When to kill what still runs; None: never."""
    _refused_at: float | None = field(init=False, default=None)

    def run(self) -> AttemptResult:
        """Run the command until nothing of it is left. Raises OSError if it cannot be started."""
        memory_kills = count_memory_kills() or 0
        self._start()
        try:
            while not self._is_over():
                self._wait()
                for number in self.signals.read():
                    self._handle_signal(number)
                self.child.reap()  # before the reports are read, so that all reports of an exited child are in them
                self._read_reports()
                self._check_deadlines()
                self.on_change(self)
            self._end_leftovers()
        finally:
            self.child.take_back_terminal()
            for relay in self._relays:
                relay.finish(_OUTPUT_TIMEOUT_S)
        self._read_reports()
        assert self.child.code is not None
        return AttemptResult(
            code=self.child.code,
            status=self.status,
            stop=self.stop.reason if self.stop else None,
            paused=self.stop is not None and self.stop.paused,
            killed=self.killed,
            hung_s=self.hung_s,
            memory_kills=(count_memory_kills() or 0) - memory_kills,
        )

    def request_stop(self, reason: str, *, paused: bool = False, at_once: bool = False) -> None:
        """Stop the job. A second request changes nothing. `at_once`: kill it."""
        if self.stop is not None:
            return
        now = time.monotonic()
        self._phase, self.stop = Phase.STOPPING, AttemptStop(reason, now, paused)
        if at_once:
            self._kill_at = now
            return
        if self.grace_period is not None:
            self._kill_at = now + self.grace_period.total_seconds() - KILL_MARGIN_S
        else:
            self._kill_at = None
        self._send_sigterm()

    # Events

    def _start(self) -> None:
        self._relays = [OutputRelay(fd, self.output_log) for fd in self.output]
        stdout, stderr = (relay.child_fd for relay in self._relays)
        try:
            self.child = Child(self.command.argv, self.environment, stdout, stderr)
        except OSError:
            for relay in self._relays:
                os.close(relay.child_fd)
            raise
        for relay in self._relays:
            relay.start()

    def _wait(self) -> None:
        timeout_s = _POLL_INTERVAL_S
        if self._kill_at is not None:
            timeout_s = min(timeout_s, max(0.0, self._kill_at - time.monotonic()))
        select.select([self.signals.reader, self.listener.socket], [], [], timeout_s)

    def _handle_signal(self, number: int) -> None:
        if number in STOP_SIGNALS:
            self.request_stop(signal.Signals(number).name)
        elif number == signal.SIGWINCH:
            for relay in self._relays:
                relay.resize()
        elif number in _FORWARDED_SIGNALS:
            self.child.signal(number)

    def _read_reports(self) -> None:
        for report in self.listener.read():
            self._handle_report(report)

    def _handle_report(self, report: Report) -> None:
        if isinstance(report.message, Pause):
            self.request_stop("reprieve pause", paused=True)
            return
        self.status.update(report)
        if self.status.stopping is not None and self._phase is Phase.RUNNING:
            # A cloud's notice, a rank on another machine, or a SIGTERM that the launcher has not sent. torchrun must
            # not restart its ranks in place.
            self.request_stop(self.status.stopping)
        if self.status.refused is not None and self._refused_at is None:
            self._refused_at = time.monotonic()
            if self._phase is Phase.RUNNING:
                self._phase = Phase.REFUSED

    def _check_deadlines(self) -> None:
        now = time.monotonic()
        if self._kill_at is not None and now >= self._kill_at:
            self._kill()
        elif self.child.code is not None and self._phase in (Phase.RUNNING, Phase.REFUSED, Phase.ENDING):
            # The process that started the ranks is gone. They save and exit.
            grace_s = self.grace_period.total_seconds() if self.grace_period is not None else _ORPHANS_TIMEOUT_S
            self._end(Phase.ORPHANED, grace_s)
        elif self._refused_at is not None and self._kill_at is None and now - self._refused_at > _REFUSED_WAIT_S:
            # torchrun would start the ranks again in place.
            self._end(Phase.ENDING if self.stop is None else Phase.STOPPING, _END_TIMEOUT_S)
        elif self.hang_timeout is not None and self._phase not in (Phase.STOPPING, Phase.HUNG):
            last = self.status.last_report_at
            if last is not None and now - last > self.hang_timeout.total_seconds() and not self.status.finished:
                self._end_hanging_job(now - last)

    def _is_over(self) -> bool:
        """Return whether the child has exited and so have its ranks."""
        return self.child.code is not None and (self.killed or not self.child.alive(self.status.pids))

    # Actions

    def _end(self, phase: Phase, timeout_s: float) -> None:
        """Send SIGTERM, and SIGKILL after the timeout."""
        self._phase, self._kill_at = phase, time.monotonic() + timeout_s
        self._send_sigterm()

    def _send_sigterm(self) -> None:
        if self.status.ranks:
            self.child.signal(signal.SIGTERM, self.status.pids)
        else:
            self.child.signal_group(signal.SIGTERM)

    def _end_hanging_job(self, silent_s: float) -> None:
        log.error("no step in %.0f s: the job hangs after step %d. Stacks of its ranks:", silent_s, self.status.step)
        self.hung_s = silent_s
        for pid in sorted(self.child.alive(self.status.pids)):
            self.child.signal_one(signal.SIGQUIT, pid)  # a rank prints its stacks to stderr
        time.sleep(_STACKS_WAIT_S)
        self._end(Phase.HUNG, _END_TIMEOUT_S)

    def _kill(self) -> None:
        if not self.killed:
            self.killed = True
            if self.stop is not None and self._kill_at != self.stop.at:
                log.error("the grace period is over and the job still runs: killing it")
        if self.child.end_all(0.0) and self.child.code is None:
            self.child.code = -signal.SIGKILL  # pending, until the kernel releases the process

    def _end_leftovers(self) -> None:
        """End every process that the command has left behind: nothing outlives the launcher."""
        timeout_s = _LEFTOVERS_TIMEOUT_S
        if self._kill_at is not None:
            timeout_s = min(timeout_s, max(0.0, self._kill_at - time.monotonic()))
        if stuck := self.child.end_all(timeout_s):
            log.error("SIGKILL does not end %s: is storage that they use not responding?", sorted(stuck))
