"""The child and everything that descends from it: started, signalled, reaped, and in the end gone.

The launcher is their subreaper (or PID 1): whoever loses its parent becomes the launcher's child, so nobody gets away.
If the launcher itself is killed, the child is told to stop by the kernel.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from reprieve import exit_codes

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LOOK_S = 0.02
_libc = ctypes.CDLL(None, use_errno=True)


def become_subreaper() -> None:
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


class Child:
    """The command, running in a process group of its own."""

    def __init__(
        self, argv: Sequence[str], env: Mapping[str, str], stdout: IO[Any] | int, stderr: IO[Any] | int
    ) -> None:
        """Raises OSError where it cannot be started."""
        parent = os.getpid()

        def in_child() -> None:
            os.setpgid(0, 0)
            _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
            if os.getppid() != parent:
                os._exit(exit_codes.PREEMPTED)  # the launcher was gone before we asked to be told

        self._process = subprocess.Popen(  # noqa: S603 - what the user typed, and no shell
            list(argv),
            env=dict(env),
            stdout=stdout,
            stderr=stderr,
            preexec_fn=in_child,  # noqa: PLW1509 - it takes no lock
        )
        self.pid = self._process.pid
        self.code: int | None = None
        """How it ended: an exit code, or minus the signal that killed it."""
        self._foreground()

    def reap(self) -> None:
        """Take note of everybody who has ended."""
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
        """To the child, and to these; to nobody twice, and to nobody who is not a descendant."""
        ours = descendants()
        for pid in {self.pid, *pids}:
            if pid in ours:
                _kill(pid, number)

    def signal_one(self, number: int, pid: int) -> None:
        _kill(pid, number)

    def signal_group(self, number: int) -> None:
        """To the whole group that the child started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    def alive(self, pids: Iterable[int]) -> set[int]:
        """Those of them that still run."""
        return descendants() & set(pids)

    def end_all(self, patience_s: float) -> set[int]:
        """Nobody is left: asked first, killed after so many seconds. Those whom not even that ends: stuck in the
        kernel, on a disk that does not answer."""
        asked: set[int] = set()
        ask_until = time.monotonic() + patience_s
        give_up = ask_until + 5.0
        while left := descendants():
            now = time.monotonic()
            if now > give_up:
                return left
            for pid in left:
                if now > ask_until:
                    _kill(pid, signal.SIGKILL)
                elif pid not in asked:
                    asked.add(pid)
                    _kill(pid, signal.SIGTERM)
                    _kill(pid, signal.SIGCONT)
            time.sleep(_LOOK_S)
            self.reap()
        self.reap()
        return set()

    def _foreground(self) -> None:
        """At a terminal the child is what the keyboard talks to: Ctrl-C is for it, and it may ask questions."""
        with contextlib.suppress(OSError):
            if os.isatty(0) and os.tcgetpgrp(0) == os.getpgrp():
                signal.signal(signal.SIGTTOU, signal.SIG_IGN)
                os.tcsetpgrp(0, self.pid)

    def _suspend(self) -> None:
        """Ctrl-Z was for the child; the shell waits for us. Until it says `fg` or `bg`."""
        self.take_back_terminal()
        os.kill(os.getpid(), signal.SIGSTOP)
        self._foreground()
        self.signal_group(signal.SIGCONT)

    @staticmethod
    def take_back_terminal() -> None:
        with contextlib.suppress(OSError):
            if os.isatty(0):
                os.tcsetpgrp(0, os.getpgrp())


def descendants(of: int | None = None) -> set[int]:
    """Of this process, or of another, that have not ended (zombies have)."""
    parents: dict[int, int] = {}
    for entry in os.listdir("/proc"):  # noqa: PTH208 - names are enough, and there are thousands
        if entry.isdigit() and (stat := _stat(int(entry))) is not None and stat[0] not in "ZX":
            parents[int(entry)] = int(stat[1])
    ours: set[int] = set()
    found = {of or os.getpid()}
    while found:
        found = {pid for pid, parent in parents.items() if parent in found}
        ours |= found
    return ours


def start_time(pid: int) -> str | None:
    """With the pid it names one process of a machine, as long as that is not booted again; None: there is none."""
    stat = _stat(pid)
    return stat[19] if stat is not None and stat[0] not in "ZX" else None


def boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _stat(pid: int) -> list[str] | None:
    """From the state on; the name before it may hold anything."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return text.rpartition(")")[2].split()


def _kill(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)
