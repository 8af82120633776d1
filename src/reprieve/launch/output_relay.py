"""What the command prints: passed on as it comes, and kept in the run's log.

A thread for each stream, so that a reader of ours who stands still holds up the command, as it would without us, and
never the launcher. At a terminal the command sees a terminal.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import select
import struct
import termios
import threading
from pathlib import Path

_BYTES = 2**16
_LOG_BYTES = 64 * 2**20
"""Then a new log is begun; one old one is kept."""


class OutputLog:
    """The file. One that cannot be written any more is left as it is."""

    def __init__(self, path: Path | None) -> None:
        """None: nothing is kept."""
        self._path = path
        self._lock = threading.Lock()
        self._fd: int | None = None
        self.problem: str | None = None
        if path is not None:
            self._open(path)

    def write(self, data: bytes) -> None:
        with self._lock:
            if self._fd is None or self._path is None:
                return
            try:
                os.write(self._fd, data)
                if os.fstat(self._fd).st_size > _LOG_BYTES:
                    os.close(self._fd)
                    self._path.replace(self._path.with_name(f"{self._path.name}.1"))
                    self._open(self._path)
            except OSError as error:
                self.problem, self._fd = f"{error.strerror} ({self._path})", None

    def close(self) -> None:
        with self._lock:
            if self._fd is not None:
                os.close(self._fd)
                self._fd = None

    def _open(self, path: Path) -> None:
        try:
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        except OSError as error:
            self.problem = f"{error.strerror} ({path})"


class OutputRelay:
    """One of the command's: stdout or stderr."""

    def __init__(self, ours: int, log: OutputLog) -> None:
        """`ours`: the descriptor it goes on to."""
        self._ours = ours
        self._log = log
        self._gone = False
        """Nobody reads ours any more: the command is not to notice."""
        if _is_terminal(ours):
            self._read, self.theirs = pty.openpty()
            mode = termios.tcgetattr(self.theirs)
            mode[1] &= ~termios.OPOST  # our own terminal does that
            termios.tcsetattr(self.theirs, termios.TCSANOW, mode)
            self.resize()
        else:
            self._read, self.theirs = os.pipe()
        os.set_inheritable(self._read, False)
        self._thread = threading.Thread(target=self._pass_on, name=f"output {ours}", daemon=True)

    def start(self) -> None:
        """The child has it now."""
        os.close(self.theirs)
        self._thread.start()

    def resize(self) -> None:
        """The terminal's size is the command's, too."""
        with contextlib.suppress(OSError):
            size = fcntl.ioctl(self._ours, termios.TIOCGWINSZ, struct.pack("HHHH", 0, 0, 0, 0))
            fcntl.ioctl(self._read, termios.TIOCSWINSZ, size)

    def finish(self, patience_s: float) -> None:
        """All that was printed has been passed on; or somebody still holds the other end."""
        self._thread.join(patience_s)

    def _pass_on(self) -> None:
        line = b""
        while True:
            try:
                data = os.read(self._read, _BYTES)
            except OSError:  # a terminal whose other end is closed
                break
            if not data:
                break
            # The log has two writers: it gets whole lines.
            line += data
            end = max(line.rfind(b"\n"), line.rfind(b"\r")) + 1 or len(line) // _BYTES * _BYTES
            self._log.write(line[:end])
            line = line[end:]
            self._to_ours(memoryview(data))
        self._log.write(line)
        os.close(self._read)

    def _to_ours(self, data: memoryview) -> None:
        while data and not self._gone:
            try:
                data = data[os.write(self._ours, data) :]
            except BlockingIOError:
                select.select([], [self._ours], [])
            except OSError:
                self._gone = True


def _is_terminal(fd: int) -> bool:
    try:
        return os.isatty(fd)
    except OSError:
        return False
