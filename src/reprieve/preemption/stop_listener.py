"""The guard: whoever says that the run must stop, it is noted once, with the deadline, and passed on.

    SIGTERM | notice | `request()`  →  Guard  →  on_stop (the ranks agree on a step)  →  the training loop

It sets a flag and a deadline and tells one listener. Everything that takes time happens elsewhere.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone
from queue import SimpleQueue

from reprieve.console import ONE_RANK
from reprieve.errors import ConfigError
from reprieve.preemption.deadline import Grace
from reprieve.preemption.notices import Notice, NoticePoller, detect_clouds
from reprieve.preemption.signals import signal_watch

log = logging.getLogger("reprieve")


ANOTHER_RANK = "a stop request to another rank"
"""The reason on ranks that were not stopped from outside themselves."""


@dataclass(frozen=True, slots=True)
class StopRequest:
    """Why and until when."""

    reason: str
    at: float
    """When we were told, by `time.monotonic`."""
    deadline: float | None
    """When we will be killed, by `time.monotonic`; None: nobody is known to."""
    certain: bool = False
    """Is the deadline known, and not only what is usual?"""
    signal: int | None = None

    def remaining_s(self) -> float | None:
        """Return the seconds until the deadline, or None if no deadline is known."""
        return None if self.deadline is None else self.deadline - time.monotonic()


class StopListener:
    """Listens for reasons to stop, from `start` to `close`. The first counts; later ones can only bring the deadline
    nearer."""

    def __init__(
        self,
        on_stop: Callable[[], None],
        *,
        grace: Grace,
        signals: Iterable[int | str] = (signal.SIGTERM,),
        kill_wait: timedelta = timedelta(0),
        notices: str | Sequence[str] = "auto",
    ) -> None:
        """`on_stop`: called once, on a thread of the guard, `kill_wait` after the first reason."""
        self.grace = grace
        self.signals = tuple(signal_number(one) for one in signals)
        self.stop: StopRequest | None = None
        self._on_stop = on_stop
        self._kill_wait = kill_wait
        self._mail: SimpleQueue[str | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="reprieve guard", daemon=True)
        # One process of a machine is enough: the ranks tell each other.
        watched = detect_clouds(notices) if os.environ.get("LOCAL_RANK", "0") == "0" else ()
        self._watchers = [NoticePoller(cloud, self._noticed) for cloud in watched]
        self.handles_signals = False

    def start(self) -> None:
        self._thread.start()
        self.handles_signals = signal_watch.subscribe(self.signals, self._signalled)
        if not self.handles_signals:
            log.info("signals are heard on the main thread, and this is another: only notices and request() are heard")
        for watcher in self._watchers:
            watcher.start()

    def reassert_signals(self) -> None:
        """Now and then: see `SignalWatch.keep`."""
        if self.handles_signals:
            signal_watch.reassert()

    def request(self, reason: str, *, deadline: float | None = None, number: int | None = None) -> None:
        """The run must stop. From any thread, a signal handler included; returns at once."""
        now = time.monotonic()
        certain = deadline is not None or self.grace.certain
        given = deadline is not None
        if deadline is None and self.grace.period is not None:
            deadline = now + self.grace.period.total_seconds()
        if (stop := self.stop) is None:
            # Two threads may both come here: one of two reasons at the same moment is then lost, and nothing else.
            self.stop = StopRequest(reason, now, deadline, certain, number)
            self._mail.put(reason)
        elif given and deadline is not None and (stop.deadline is None or deadline < stop.deadline):
            self.stop = replace(stop, deadline=deadline, certain=True)

    def call_previous_handler(self) -> None:
        """What was there before us for the signal that came: it has waited until everything was saved."""
        number = self.stop.signal if self.stop is not None else None
        handler = signal_watch.previous_handler(number) if number is not None else None
        if handler is not None and number is not None and handler is not signal.default_int_handler:
            handler(number, None)

    def close(self) -> None:
        signal_watch.unsubscribe(self._signalled)
        self._mail.put(None)
        for watcher in self._watchers:
            watcher.close()

    def _signalled(self, number: int) -> None:
        # No log, no lock: this may be in the middle of anything.
        self.request(signal.Signals(number).name, number=number)

    def _noticed(self, notice: Notice) -> None:
        if not notice.urgent:
            log.warning("%s: %s", notice.source, notice.reason, extra=ONE_RANK)
            return
        left = 0.0 if notice.deadline is None else (notice.deadline - datetime.now(timezone.utc)).total_seconds()
        # A deadline that is over was none: we are still here, and have what the platform gives.
        self.request(f"{notice.source}: {notice.reason}", deadline=time.monotonic() + left if left > 0 else None)

    def _serve(self) -> None:
        if (reason := self._mail.get()) is None:
            return
        log.warning("stop requested: %s. Grace period: %s", reason, self.grace)
        wait = self._kill_wait.total_seconds()
        if wait > 0:
            log.warning("going on for %g s before saving (kill_wait)", wait)
            threading.Event().wait(wait)
        self._on_stop()


def signal_number(name: int | str) -> int:
    """`"SIGUSR1"`, `"USR1"` or a number; only what a process can handle."""
    try:
        if isinstance(name, str):
            number = signal.Signals[name if name.startswith("SIG") else f"SIG{name}"]
        else:
            number = signal.Signals(name)
    except (KeyError, ValueError):
        raise ConfigError(f"{name!r} is not a signal: write it like 'SIGTERM' or 'SIGUSR1'") from None
    if number in (signal.SIGKILL, signal.SIGSTOP):
        raise ConfigError(f"{number.name} cannot be handled by any process")
    return int(number)
