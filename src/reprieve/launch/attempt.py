"""One start of the command, until nothing of it is left. A loop over what happens: signals to us, reports of the
ranks, the end of the child, and time that is up.

    told to stop ──► the child and the ranks are told ──► they save and end ──► or are killed at the deadline

Who is told: the child, as the init of a container would, and every rank that has reported itself, since what is between
us and them (a shell, `accelerate launch`) may not pass signals on. Before any rank is known: the whole group.
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
from types import FrameType
from typing import Any

from reprieve.launch.command import Command
from reprieve.launch.output_relay import OutputLog, OutputRelay
from reprieve.launch.process import Child
from reprieve.launch.rank_status import JobStatus
from reprieve.launch.runs.outcome import AttemptResult
from reprieve.launcher_protocol import Listener, Pause, Report

log = logging.getLogger("reprieve")

STOPS = (signal.SIGTERM, signal.SIGHUP)
"""A terminal that is closed stops a run, as a preemption does."""
_PASSED_ON = (signal.SIGINT, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT)
_MARGIN_S = 0.25
"""How long before the deadline what still runs is killed, so that we end by ourselves. Ranks end 0.5 s before it."""
_LOOK_S = 1.0
_AFTER_CHILD_S = 2.0
"""How long what the child leaves behind may take to end when it is asked to."""
_ORPHANED_S = 30.0
"""The same for ranks: they save. Where no grace period is known, what Kubernetes gives."""
_ASKED_S = 10.0
"""How long a job that hangs, or cannot start, may take to end when asked to: perhaps a rank can still say why."""
_REFUSED_S = 2.0
"""How long after a rank has said that it cannot start the command may take to end by itself."""
_STACKS_S = 1.0
_OUTPUT_S = 2.0


class Signals:
    """Those that come to the launcher, from the first moment on: none is lost between two attempts."""

    def __init__(self) -> None:
        self.reader, self._writer = socket.socketpair()
        self.reader.setblocking(False)
        self._writer.setblocking(False)
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        for number in (*STOPS, *_PASSED_ON, signal.SIGCHLD, signal.SIGWINCH):
            self._before[number] = signal.signal(number, _noted)
        return self

    def __exit__(self, *exc: object) -> None:
        signal.set_wakeup_fd(-1)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self.reader.close()
        self._writer.close()

    def read(self) -> list[int]:
        try:
            return list(self.reader.recv(4096))
        except BlockingIOError:
            return []


def _noted(number: int, frame: FrameType | None) -> None:
    """The number is in the wake-up descriptor."""


@dataclass(slots=True)
class StopRequest:
    """The run is to end, and go on another time."""

    reason: str
    at: float
    deadline: float | None
    """Until when, by the monotonic clock; None: nobody kills us."""
    paused: bool = False


@dataclass(slots=True)
class Attempt:
    """Runs the command once."""

    command: Command
    environment: Mapping[str, str]
    signals: Signals
    listener: Listener
    log: OutputLog
    grace: timedelta | None
    hang: timedelta | None
    on_change: Callable[[Attempt], None]
    """Called whenever something has happened, and every second."""
    output: tuple[int, int] = (1, 2)
    """The descriptors that the command's stdout and stderr are passed on to."""
    seen: JobStatus = field(default_factory=JobStatus)
    stop: StopRequest | None = None
    hung_s: float | None = None
    killed: bool = False
    child: Child = field(init=False)
    _streams: list[OutputRelay] = field(init=False, default_factory=list)
    _end_by: float | None = field(init=False, default=None)
    """What still runs then is killed."""
    _orphaned: bool = field(init=False, default=False)
    _refused_at: float | None = field(init=False, default=None)

    def run(self) -> AttemptResult:
        """Raises OSError where the command cannot be started."""
        self._streams = [OutputRelay(fd, self.log) for fd in self.output]
        out, err = (stream.theirs for stream in self._streams)
        try:
            self.child = Child(self.command.argv, self.environment, out, err)
        except OSError:
            for stream in self._streams:
                os.close(stream.theirs)
            raise
        for stream in self._streams:
            stream.start()
        try:
            while not self._over():
                self._wait()
                for number in self.signals.read():
                    self._signalled(number)
                self.child.reap()  # before the reports are read: what the child has reported before its end is in them
                for told in self.listener.read():
                    self._told(told)
                self._look_at_clock()
                self.on_change(self)
            self._end_the_rest()
        finally:
            self.child.take_back_terminal()
            for stream in self._streams:
                stream.finish(_OUTPUT_S)
        for told in self.listener.read():
            self._told(told)
        assert self.child.code is not None
        stop = self.stop
        return AttemptResult(
            code=self.child.code,
            seen=self.seen,
            stop=stop.reason if stop else None,
            paused=stop is not None and stop.paused,
            killed=self.killed,
            hung_s=self.hung_s,
        )

    def request_stop(self, reason: str, *, paused: bool = False, at_once: bool = False) -> None:
        """Once; a second time changes nothing. `at_once`: it is killed."""
        if self.stop is not None:
            return
        now = time.monotonic()
        deadline = now + self.grace.total_seconds() if self.grace is not None else None
        self.stop = StopRequest(reason, now, deadline, paused)
        self._end_by = deadline - _MARGIN_S if deadline is not None else None
        if at_once:
            self._end_by = now
        else:
            self._tell_to_stop()

    # What happens

    def _wait(self) -> None:
        timeout = _LOOK_S
        if self._end_by is not None:
            timeout = min(timeout, max(0.0, self._end_by - time.monotonic()))
        select.select([self.signals.reader, self.listener.socket], [], [], timeout)

    def _signalled(self, number: int) -> None:
        if number in STOPS:
            self.request_stop(signal.Signals(number).name)
        elif number == signal.SIGWINCH:
            for stream in self._streams:
                stream.resize()
        elif number in _PASSED_ON:
            self.child.signal(number)

    def _told(self, told: Report) -> None:
        if isinstance(told.message, Pause):
            self.request_stop("reprieve pause", paused=True)
            return
        self.seen.update(told)
        if self.seen.stopping is not None and self.stop is None and self._end_by is None and self._refused_at is None:
            # A cloud's notice, a rank on another machine, or a SIGTERM that the launcher has not sent. torchrun must
            # not start its ranks again in place.
            self.request_stop(self.seen.stopping)
        if self.seen.refused is not None and self._refused_at is None:
            self._refused_at = time.monotonic()

    def _look_at_clock(self) -> None:
        now = time.monotonic()
        if self._end_by is not None and now >= self._end_by:
            self._kill()
        elif self.child.code is not None and not self._orphaned:
            self._orphaned = True
            if self.stop is None and self.hung_s is None:
                # Whoever started the ranks is gone; they save, and end.
                self._end_by = now + (self.grace.total_seconds() if self.grace is not None else _ORPHANED_S)
                self._tell_to_stop()
        elif self._refused_at is not None and self._end_by is None and now - self._refused_at > _REFUSED_S:
            # It has had time to say why; torchrun would start it again in place.
            self._end_by = now + _ASKED_S
            self._tell_to_stop()
        elif self.hang is not None and self.stop is None and self.hung_s is None:
            last = self.seen.last_report_at
            if last is not None and now - last > self.hang.total_seconds() and not self.seen.finished:
                self._found_hanging(now - last)

    def _over(self) -> bool:
        """The child has ended, and so have its ranks."""
        return self.child.code is not None and not (self.child.alive(self.seen.pids) and not self.killed)

    # What is done about it

    def _tell_to_stop(self) -> None:
        if self.seen.ranks:
            self.child.signal(signal.SIGTERM, self.seen.pids)
        else:
            self.child.signal_group(signal.SIGTERM)

    def _found_hanging(self, since_s: float) -> None:
        log.error("no step in %.0f s: the job hangs, after step %d. Where its ranks are:", since_s, self.seen.step)
        self.hung_s = since_s
        for pid in sorted(self.child.alive(self.seen.pids)):
            self.child.signal_one(signal.SIGQUIT, pid)  # a rank answers with its stacks, on stderr
        time.sleep(_STACKS_S)
        self._end_by = time.monotonic() + _ASKED_S
        self._tell_to_stop()

    def _kill(self) -> None:
        if not self.killed:
            self.killed = True
            if self.stop is not None and self._end_by != self.stop.at:
                log.error("the grace period is over and the job still runs: it is killed")
        if self.child.end_all(0.0) and self.child.code is None:
            self.child.code = -signal.SIGKILL  # it will be, when the kernel lets go of it

    def _end_the_rest(self) -> None:
        """Whatever the command has left behind: nothing outlives its launcher."""
        patience = _AFTER_CHILD_S
        if self._end_by is not None:
            patience = min(patience, max(0.0, self._end_by - time.monotonic()))
        if stuck := self.child.end_all(patience):
            log.error("not even SIGKILL ends %s: stuck in the kernel, on storage that does not answer?", sorted(stuck))
