"""The exit of a stopped process, with 143 whatever its script does with the exception.

After `SystemExit`, `finally`, `except BaseException`, atexit handlers and non-daemon threads still run, and may hang or
exit with 0. So a watchdog ends the process after a while, and the last of the atexit handlers sets the exit code. A
process that ends by a permanent failure exits with 42.

A process that belongs to a framework (a worker of Ray) must not end: that would count as a failure there. It is handed
back to its host instead.
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
from reprieve.preemption.process_host import ProcessHost

log = logging.getLogger("reprieve")

_FLUSH_S = 0.2


class Preempted(SystemExit):
    """The run was stopped, and resumes at its next start. Raised at a boundary, after everything was saved. The process
    exits with 143, so do not catch it; if it is caught, the next boundary raises it again."""

    def __init__(
        self,
        reason: str = "",
        *,
        step: int | None = None,
        saved: bool = False,
        checkpoint: str | None = None,
        requested_at: float | None = None,
    ) -> None:
        super().__init__(exit_codes.PREEMPTED)
        self.reason = reason
        self.step = step
        """The last completed step."""
        self.saved = saved
        """Whether that step is in a checkpoint."""
        self.checkpoint = checkpoint
        """The path of that checkpoint."""
        self.requested_at = requested_at
        """When this process learned of the stop, by `time.monotonic`; None: unknown."""


class ProcessExit:
    """The exit of this process: its code, and when it is forced."""

    def __init__(self) -> None:
        self.host: ProcessHost | None = None
        """The framework that owns this process. It decides when the process ends."""
        self._code: int | None = None
        self._prepared = False

    def prepare(self) -> None:
        """Install the hooks. Call this early: the atexit handler that is registered first runs last."""
        if not self._prepared and self.host is None:
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
        """Force an exit with this code after `seconds`. `decided`: also use this code if the process ends by itself
        before. A host replaces the workers of a failed job itself, so there only a stop has an effect."""
        if self.host is not None and code != exit_codes.PREEMPTED:
            return
        if decided:
            self._code = code
        threading.Thread(target=self._after, args=(seconds, code, why), name="reprieve exit", daemon=True).start()

    def exit_now(self) -> None:
        """Exit with 143 from any thread, whatever other threads do."""
        self._end(exit_codes.PREEMPTED)

    def raise_or_exit(self, stopped: Preempted) -> NoReturn:
        """Leave the training loop after everything is saved. Outside the main thread an exception would end only that
        thread, and the script would continue, so exit there. A host catches the exception on whatever thread."""
        if self.host is None and threading.current_thread() is not threading.main_thread():
            self.exit_now()
        raise stopped

    def _after(self, seconds: float, code: int, why: str) -> None:
        threading.Event().wait(max(0.0, seconds))
        if self.host is None:
            reason = why or f"still running {seconds:g} s later:"
            log.error("%s ending the process now, with exit code %d", reason, code)
        self._end(code)

    def _at_exit(self) -> None:
        if self._code is not None and self.host is None:
            self._end(self._code)

    def _end(self, code: int) -> None:
        if self.host is not None:
            self.host.hand_back()
            return
        # On a thread, if one can still start: the main thread may hang in a stream and hold its lock.
        flushing = threading.Thread(target=_flush, name="reprieve flush", daemon=True)
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
"""The exit of this process."""
