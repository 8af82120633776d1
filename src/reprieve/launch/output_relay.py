"""Relays the command's output to the launcher's own, and writes it to the run's log.

Each stream has a thread: a slow reader of the launcher's output blocks the command, as it would without the launcher,
but never the launcher. Where the launcher has a terminal, the command sees a terminal.
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
"""A larger log is rotated; one old log is kept."""


class OutputLog:
    """The log file of a run. After a write error it is left as it is."""

    def __init__(self, path: Path | None) -> None:
        """`path`: None writes no log."""
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
    """Relays stdout or stderr of the command."""

    def __init__(self, target_fd: int, log: OutputLog) -> None:
        """`target_fd`: the launcher's own descriptor."""
        self._target_fd = target_fd
        self._log = log
        self._is_closed = False
        """The target has no reader any more. The command must not notice."""
        if _is_terminal(target_fd):
            self._read, self.child_fd = pty.openpty()
            mode = termios.tcgetattr(self.child_fd)
            mode[1] &= ~termios.OPOST  # the launcher's own terminal does that
            termios.tcsetattr(self.child_fd, termios.TCSANOW, mode)
            self.resize()
        else:
            self._read, self.child_fd = os.pipe()
        os.set_inheritable(self._read, False)
        self._thread = threading.Thread(target=self._relay, name=f"reprieve output {target_fd}", daemon=True)

    def start(self) -> None:
        """Start relaying. The child has inherited `child_fd`, which is closed here."""
        os.close(self.child_fd)
        self._thread.start()

    def resize(self) -> None:
        """Give the command's terminal the size of the launcher's."""
        with contextlib.suppress(OSError):
            size = fcntl.ioctl(self._target_fd, termios.TIOCGWINSZ, struct.pack("HHHH", 0, 0, 0, 0))
            fcntl.ioctl(self._read, termios.TIOCSWINSZ, size)

    def finish(self, timeout_s: float) -> None:
        """Wait until all output is relayed, or until the timeout, if a process still holds the other end."""
        self._thread.join(timeout_s)

    def _relay(self) -> None:
        line = b""
        while True:
            try:
                data = os.read(self._read, _BYTES)
            except OSError:  # a terminal with a closed other end
                break
            if not data:
                break
            # Both relays write to the log: write whole lines.
            line += data
            end = max(line.rfind(b"\n"), line.rfind(b"\r")) + 1 or len(line) // _BYTES * _BYTES
            self._log.write(line[:end])
            line = line[end:]
            self._write_to_target(memoryview(data))
        self._log.write(line)
        os.close(self._read)

    def _write_to_target(self, data: memoryview) -> None:
        while data and not self._is_closed:
            try:
                data = data[os.write(self._target_fd, data) :]
            except BlockingIOError:
                select.select([], [self._target_fd], [])
            except OSError:
                self._is_closed = True


def _is_terminal(fd: int) -> bool:
    try:
        return os.isatty(fd)
    except OSError:
        return False
