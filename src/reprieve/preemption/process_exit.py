"""A stopped process ends with 143, whatever its script does with the exception.

`SystemExit` is not the end: `finally`, `except BaseException`, atexit handlers and threads that are not daemons still
run, and may hang or exit with 0. So a watchdog ends the process after a while, and the last of the atexit handlers
ends it with the right code. A process that ends by one of our errors that only a person can put right ends with 42.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import threading
from types import TracebackType
from typing import NoReturn

from reprieve import exit_codes
from reprieve.errors import is_permanent

log = logging.getLogger("reprieve")

_FLUSH_S = 0.2


class Preempted(SystemExit):
    """The run was stopped, and goes on at its next start. Raised at a step boundary, after everything was saved. The
    process exits with 143; let it pass. One that is caught is raised again at the next boundary."""

    def __init__(self, reason: str = "") -> None:
        super().__init__(exit_codes.PREEMPTED)
        self.reason = reason


class ProcessExit:
    """How this process will end."""

    def __init__(self) -> None:
        self._code: int | None = None
        self._prepared = False

    def prepare(self) -> None:
        """Early: what was registered with atexit first runs last."""
        if not self._prepared:
            self._prepared = True
            atexit.register(self._at_exit)
            before = sys.excepthook

            def uncaught(kind: type[BaseException], error: BaseException, at: TracebackType | None) -> None:
                if self._code is None and is_permanent(error):
                    self._code = exit_codes.PERMANENT_FAILURE
                before(kind, error, at)

            sys.excepthook = uncaught

    def schedule(
        self, seconds: float, code: int = exit_codes.PREEMPTED, *, why: str = "", decided: bool = True
    ) -> None:
        """The process ends with this code: by itself, or when so many seconds have passed. Not `decided`: if it ends by
        itself, then as it likes."""
        if decided:
            self._code = code
        threading.Thread(target=self._after, args=(seconds, code, why), name="reprieve ending", daemon=True).start()

    def exit_now(self) -> None:
        """With 143, from any thread, whatever the others do."""
        _end(exit_codes.PREEMPTED)

    def raise_or_exit(self, stopped: Preempted) -> NoReturn:
        """Everything is saved. On another thread than the main one an exception would end that thread, and the script
        would go on."""
        if threading.current_thread() is not threading.main_thread():
            self.exit_now()
        raise stopped

    def _after(self, seconds: float, code: int, why: str) -> None:
        threading.Event().wait(max(0.0, seconds))
        log.error("%s ending the process now, with exit code %d", why or f"still running {seconds:g} s later:", code)
        _end(code)

    def _at_exit(self) -> None:
        if self._code is not None:
            _end(self._code)


def _end(code: int) -> None:
    # On a thread, if there can still be one: whoever hangs may hang in a stream, and hold its lock.
    flushing = threading.Thread(target=_flush, daemon=True)
    try:
        flushing.start()
    except RuntimeError:  # the interpreter is ending
        _flush()
    else:
        flushing.join(_FLUSH_S)
    os._exit(code)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


process_exit = ProcessExit()
"""Of this process."""
