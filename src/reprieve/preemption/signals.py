"""Signal delivery that does not depend on the main thread: the first step of a stop.

Python runs a signal handler between two bytecodes of the main thread, so not while that is in a collective, a
compilation or a kernel launch. But the C handler writes the signal's number to a wake-up descriptor at once.
`SignalWatch` reads the other end of it in a thread and calls the listeners. The Python handler calls them, too, in case
other code (asyncio) has taken the descriptor.

A process has one watch with any number of listeners. Handlers are installed only while there is a listener, or after
`install`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterable, Sequence
from types import FrameType
from typing import Any

log = logging.getLogger("reprieve")

Listener = Callable[[int], None]
"""Called with the signal's number, on the watching thread or inside a signal handler on the main thread. It may set
flags and put into a SimpleQueue, but must not take a lock."""


class SignalWatch:
    """The handlers of this process for the signals that stop a run."""

    def __init__(self) -> None:
        self._listeners: dict[int, list[Listener]] = {}
        self._previous: dict[int, Any] = {}
        self._write = -1
        self._other_fd: tuple[int, tuple[int, int]] | None = None
        """The wake-up descriptor that other code had set, with its identity, because descriptor numbers are reused."""
        self._prepared_for_fork = False
        self._forking = threading.local()
        self._handler = self._handle  # one bound method, to compare with

    def install(self, numbers: Iterable[int]) -> None:
        """Install handlers before there is a listener, because only the main thread can, and a listener may subscribe
        on another thread. Until then these signals keep their effect."""
        if not _on_main_thread():
            return
        if self._write < 0:
            self._begin()
        for number in numbers:
            self._listeners.setdefault(number, [])
            if signal.getsignal(number) is not self._handler:
                self._previous[number] = signal.signal(number, self._handler)

    def subscribe(self, numbers: Sequence[int], listener: Listener) -> bool:
        """Call `listener` for these signals from now on. Returns False if that is impossible: this is not the main
        thread, and no handlers were installed before."""
        if not _on_main_thread() and any(signal.getsignal(number) is not self._handler for number in numbers):
            return False
        for number in numbers:
            self._listeners.setdefault(number, []).append(listener)
        self.install(numbers)
        return True

    def unsubscribe(self, listener: Listener) -> None:
        """Stop calling `listener`. After the last one, restore the handlers that were there before."""
        for listeners in self._listeners.values():
            if listener in listeners:
                listeners.remove(listener)
        if not _on_main_thread():
            return  # handlers stay installed
        for number, listeners in list(self._listeners.items()):
            if not listeners:
                del self._listeners[number]
                previous = self._previous.pop(number)
                if signal.getsignal(number) is self._handler:
                    # None: C code had set the handler, and Python cannot restore it.
                    signal.signal(number, previous if previous is not None else signal.SIG_DFL)
        if not self._listeners and self._write >= 0:
            self._end()

    def reassert(self) -> None:
        """Take the wake-up descriptor back if other code has taken it, as asyncio does. About 1 µs."""
        if not _on_main_thread():
            return
        fd = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        if fd != self._write:
            self._other_fd = _identity(fd)

    def previous_handler(self, number: int) -> Callable[[int, FrameType | None], Any] | None:
        """Return the Python handler that was installed before ours, if any."""
        previous = self._previous.get(number)
        return previous if callable(previous) else None

    def _begin(self) -> None:
        read, self._write = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._write, False)
        self._other_fd = None
        self.reassert()
        if not self._prepared_for_fork:
            os.register_at_fork(
                before=self._before_fork, after_in_parent=self._in_parent, after_in_child=self._in_child
            )
            self._prepared_for_fork = True
        threading.Thread(target=self._watch, args=(read,), name="reprieve signals", daemon=True).start()

    def _end(self) -> None:
        if (fd := signal.set_wakeup_fd(-1)) not in (-1, self._write):
            self._other_fd = _identity(fd)
        if self._other_fd is not None and _identity(self._other_fd[0]) == self._other_fd:
            signal.set_wakeup_fd(self._other_fd[0], warn_on_full_buffer=False)
        os.close(self._write)  # the thread reads the end of the pipe and ends
        self._write = -1

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._listeners.get(number):
            self._notify(number)
        elif (previous := self.previous_handler(number)) is not None:
            previous(number, frame)
        elif self._ends_process(number):
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def _watch(self, read: int) -> None:
        with os.fdopen(read, "rb", buffering=0) as pipe:
            while numbers := pipe.read(64):
                for number in numbers:
                    if self._ends_process(number):
                        os._exit(128 + number)  # the main thread may be in C code for a long time
                    self._notify(number)
                if (other_fd := self._other_fd) is not None and _identity(other_fd[0]) == other_fd:
                    with contextlib.suppress(OSError):
                        os.write(other_fd[0], numbers)

    def _ends_process(self, number: int) -> bool:
        """Whether the signal should end the process: no listener, and the default action before our handler."""
        return not self._listeners.get(number, True) and self._previous.get(number) is signal.SIG_DFL

    def _notify(self, number: int) -> None:
        for listener in tuple(self._listeners.get(number, ())):
            listener(number)

    # A forked process is not the training process: `terminate()` must end it, and must not reach our listeners. A
    # signal that arrives before the child's handlers are removed would be lost there and reported here: it is blocked.

    def _before_fork(self) -> None:
        self._forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, self._listeners)

    def _in_parent(self) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._forking.mask)

    def _in_child(self) -> None:
        if self._write >= 0:
            signal.set_wakeup_fd(-1)
            for number in self._listeners:
                if signal.getsignal(number) is self._handler:
                    signal.signal(number, signal.SIG_DFL)
            # The read end stays open, unused: only the thread, which is not in the child, knew its number.
            os.close(self._write)
            self._write = -1
            self._listeners, self._previous, self._other_fd = {}, {}, None
        signal.pthread_sigmask(signal.SIG_SETMASK, self._forking.mask)


def _on_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _identity(fd: int) -> tuple[int, tuple[int, int]] | None:
    if fd < 0:
        return None
    try:
        status = os.fstat(fd)
    except OSError:
        return None
    return fd, (status.st_dev, status.st_ino)


signal_watch = SignalWatch()
"""The signal watch of this process."""
