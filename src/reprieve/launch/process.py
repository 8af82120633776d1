"""The child process and its descendants: starts, signals and reaps them, and ends all of them at last.

The launcher is their subreaper (or PID 1): orphaned descendants become its children, so that none escapes. If the
launcher itself is killed, the kernel sends SIGTERM to the child.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from reprieve import exit_codes

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_POLL_INTERVAL_S = 0.02
_KILL_TIMEOUT_S = 5.0
_libc = ctypes.CDLL(None, use_errno=True)


def become_subreaper() -> None:
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


class Child:
    """The command, running in a process group of its own."""

    def __init__(
        self, argv: Sequence[str], env: Mapping[str, str], stdout: IO[Any] | int, stderr: IO[Any] | int
    ) -> None:
        """Start the command. Raises OSError if it cannot be started."""
        parent = os.getpid()

        def in_child() -> None:
            os.setpgid(0, 0)
            _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
            if os.getppid() != parent:
                os._exit(exit_codes.PREEMPTED)  # the launcher died before prctl

        self._process = subprocess.Popen(  # noqa: S603 - what the user typed, and no shell
            list(argv),
            env=dict(env),
            stdout=stdout,
            stderr=stderr,
            preexec_fn=in_child,  # noqa: PLW1509 - it takes no lock
        )
        self.pid = self._process.pid
        self.code: int | None = None
        """The exit code, or minus the signal that killed it; None: it still runs."""
        self._move_to_foreground()

    def reap(self) -> None:
        """Reap all exited children, orphans included."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if os.WIFSTOPPED(status):
                if pid == self.pid and os.WSTOPSIG(status) == signal.SIGTSTP:
                    self._suspend()
            elif pid == self.pid:
                self.code = self._process.returncode = os.waitstatus_to_exitcode(status)

    def signal(self, number: int, pids: Iterable[int] = ()) -> None:
        """Send a signal to the child and to those of `pids` that are descendants, once to each."""
        for pid in descendants() & {self.pid, *pids}:
            _kill(pid, number)

    def signal_one(self, number: int, pid: int) -> None:
        _kill(pid, number)

    def signal_group(self, number: int) -> None:
        """Send a signal to the child's process group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    def alive(self, pids: Iterable[int]) -> set[int]:
        """Return those of `pids` that still run."""
        return descendants() & set(pids)

    def end_all(self, timeout_s: float) -> set[int]:
        """Send SIGTERM to all descendants, and SIGKILL after the timeout.

        Returns the processes that survive SIGKILL: they are stuck in the kernel, such as on unresponsive storage.
        """
        signalled: set[int] = set()
        kill_at = time.monotonic() + timeout_s
        give_up_at = kill_at + _KILL_TIMEOUT_S
        while remaining := descendants():
            now = time.monotonic()
            if now > give_up_at:
                return remaining
            for pid in remaining:
                if now > kill_at:
                    _kill(pid, signal.SIGKILL)
                elif pid not in signalled:
                    signalled.add(pid)
                    _kill(pid, signal.SIGTERM)
                    _kill(pid, signal.SIGCONT)
            time.sleep(_POLL_INTERVAL_S)
            self.reap()
        self.reap()
        return set()

    def _move_to_foreground(self) -> None:
        """Give the child the terminal: Ctrl-C goes to it, and it can read from the keyboard."""
        with contextlib.suppress(OSError):
            if os.isatty(0) and os.tcgetpgrp(0) == os.getpgrp():
                signal.signal(signal.SIGTTOU, signal.SIG_IGN)
                os.tcsetpgrp(0, self.pid)

    def _suspend(self) -> None:
        """Suspend the launcher after Ctrl-Z suspended the child, until the shell resumes it (`fg` or `bg`)."""
        self.take_back_terminal()
        os.kill(os.getpid(), signal.SIGSTOP)
        self._move_to_foreground()
        self.signal_group(signal.SIGCONT)

    @staticmethod
    def take_back_terminal() -> None:
        with contextlib.suppress(OSError):
            if os.isatty(0):
                os.tcsetpgrp(0, os.getpgrp())


def descendants(of: int | None = None) -> set[int]:
    """Return the running descendants of a process, by default of this one. Zombies do not run."""
    parents: dict[int, int] = {}
    for entry in os.listdir("/proc"):  # noqa: PTH208 - names are enough, and there are thousands
        if entry.isdigit() and (stat := _stat(int(entry))) is not None and stat[0] not in "ZX":
            parents[int(entry)] = int(stat[1])
    found: set[int] = set()
    generation = {of or os.getpid()}
    while generation:
        generation = {pid for pid, parent in parents.items() if parent in generation}
        found |= generation
    return found


@dataclass(frozen=True, slots=True)
class Process:
    """A running process of this PID namespace."""

    pid: int
    name: str
    is_idle_shell: bool
    """A shell that only waits for input: it leads a session with a terminal, and ignores SIGTERM."""


def other_processes() -> list[Process]:
    """Return the running processes of this PID namespace, but for this one and those that it may not signal."""
    found = []
    for entry in os.listdir("/proc"):  # noqa: PTH208
        pid = int(entry) if entry.isdigit() else 0
        if pid and pid != os.getpid() and (process := _process(pid)) is not None:
            found.append(process)
    return found


def _process(pid: int) -> Process | None:
    try:
        os.kill(pid, 0)
        stat = _stat(pid)
        # The main thread of a process may have ended before others.
        if stat is None or (stat[0] in "ZX" and len(os.listdir(f"/proc/{pid}/task")) < 2):  # noqa: PTH208
            return None
        name = Path(f"/proc/{pid}/comm").read_text(encoding="utf-8", errors="replace").strip()
        leads_terminal = int(stat[3]) == pid and stat[4] != "0"
        return Process(pid, name, is_idle_shell=leads_terminal and _ignores(pid, signal.SIGTERM))
    except OSError:
        return None


def _ignores(pid: int, number: int) -> bool:
    for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace").splitlines():
        if line.startswith("SigIgn:"):
            return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def start_time(pid: int) -> str | None:
    """Return when a process started; None: it does not run. With the pid it identifies a process until a reboot."""
    stat = _stat(pid)
    return stat[19] if stat is not None and stat[0] not in "ZX" else None


def _stat(pid: int) -> list[str] | None:
    """Return the fields of /proc/PID/stat from the state on. The name before them may contain anything."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return text.rpartition(")")[2].split()


def _kill(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)
