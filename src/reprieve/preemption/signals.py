"""Signals reach us whatever the main thread does: the first step of a stop.

Python runs a handler between two bytecodes of the main thread, so not while that sits in a collective, a compilation or
a kernel launch. But its C handler writes the signal's number to a wake-up descriptor at once. `SignalWatch` holds
the other end of it, in a thread that calls whoever asked. The Python handler does the same, as a second way, for the
case that somebody else (asyncio) has taken the descriptor.

One watch a process, with any number of listeners; handlers are there only while somebody listens, or said `install`.
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
"""Called with the number of the signal, from the watching thread or in the middle of the main one: it may set flags and
put into a SimpleQueue, and nothing that takes a lock."""


class SignalWatch:
    """The handlers of this process for the signals that stop a run."""

    def __init__(self) -> None:
        self._listeners: dict[int, list[Listener]] = {}
        self._previous: dict[int, Any] = {}
        self._write = -1
        self._others: tuple[int, tuple[int, int]] | None = None
        """The wake-up descriptor that somebody else set, and what it was: numbers are used again."""
        self._prepared_for_fork = False
        self._forking = threading.local()
        self._handler = self._handle  # one object, to be compared with

    def install(self, numbers: Iterable[int]) -> None:
        """A listener may come on another thread than the main one, which alone can have handlers: so they are there
        before it. Until then these signals do what they always did."""
        if not _on_main_thread():
            return
        if self._write < 0:
            self._begin()
        for number in numbers:
            self._listeners.setdefault(number, [])
            if signal.getsignal(number) is not self._handler:
                self._previous[number] = signal.signal(number, self._handler)

    def subscribe(self, numbers: Sequence[int], listener: Listener) -> bool:
        """From now on `listener` hears of these signals. False where that cannot be: not on the main thread, and nobody
        was there to say `install`."""
        if not _on_main_thread() and any(signal.getsignal(number) is not self._handler for number in numbers):
            return False
        for number in numbers:
            self._listeners.setdefault(number, []).append(listener)
        self.install(numbers)
        return True

    def unsubscribe(self, listener: Listener) -> None:
        """`listener` hears no more. Where it was the last, everything is as it was before it came."""
        for listeners in self._listeners.values():
            if listener in listeners:
                listeners.remove(listener)
        if not _on_main_thread():
            return  # handlers stay
        for number, listeners in list(self._listeners.items()):
            if not listeners:
                del self._listeners[number]
                previous = self._previous.pop(number)
                if signal.getsignal(number) is self._handler:
                    # None: set by C code. It cannot be put back from here.
                    signal.signal(number, previous if previous is not None else signal.SIG_DFL)
        if not self._listeners and self._write >= 0:
            self._end()

    def reassert(self) -> None:
        """Now and then: asyncio takes the descriptor away, and gives back none. About 1 µs."""
        if not _on_main_thread():
            return
        fd = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        if fd != self._write:
            self._others = _identity(fd)

    def previous_handler(self, number: int) -> Callable[[int, FrameType | None], Any] | None:
        """What Python code had installed before us."""
        previous = self._previous.get(number)
        return previous if callable(previous) else None

    def _begin(self) -> None:
        read, self._write = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._write, False)
        self._others = None
        self.reassert()
        if not self._prepared_for_fork:
            os.register_at_fork(
                before=self._before_fork, after_in_parent=self._in_parent, after_in_child=self._in_child
            )
            self._prepared_for_fork = True
        threading.Thread(target=self._watch, args=(read,), name="reprieve signals", daemon=True).start()

    def _end(self) -> None:
        if (fd := signal.set_wakeup_fd(-1)) not in (-1, self._write):
            self._others = _identity(fd)
        if self._others is not None and _identity(self._others[0]) == self._others:
            signal.set_wakeup_fd(self._others[0], warn_on_full_buffer=False)
        os.close(self._write)  # the thread reads the end of the pipe, and ends
        self._write = -1

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._listeners.get(number):
            self._tell(number)
        elif (previous := self.previous_handler(number)) is not None:
            previous(number, frame)
        elif self._ends(number):
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def _watch(self, read: int) -> None:
        with os.fdopen(read, "rb", buffering=0) as pipe:
            while numbers := pipe.read(64):
                for number in numbers:
                    if self._ends(number):
                        os._exit(128 + number)  # the main thread may be in C code for a long time
                    self._tell(number)
                if (others := self._others) is not None and _identity(others[0]) == others:
                    with contextlib.suppress(OSError):
                        os.write(others[0], numbers)

    def _ends(self, number: int) -> bool:
        """Nobody listens, and without us it would have ended the process."""
        return not self._listeners.get(number, True) and self._previous.get(number) is signal.SIG_DFL

    def _tell(self, number: int) -> None:
        for listener in tuple(self._listeners.get(number, ())):
            listener(number)

    # A forked process is not the training process: `terminate()` must end it, and we must not hear of it. A signal that
    # comes before its handlers are gone would be lost in the child and heard by us: so it has to wait until then.

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
            # The read end stays open, unused: only the thread knew its number, and is not here.
            os.close(self._write)
            self._write = -1
            self._listeners, self._previous, self._others = {}, {}, None
        signal.pthread_sigmask(signal.SIG_SETMASK, self._forking.mask)


def _on_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _identity(fd: int) -> tuple[int, tuple[int, int]] | None:
    if fd < 0:
        return None
    try:
        found = os.fstat(fd)
    except OSError:
        return None
    return fd, (found.st_dev, found.st_ino)


signal_watch = SignalWatch()
"""The one of this process."""
