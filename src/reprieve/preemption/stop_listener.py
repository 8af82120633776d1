"""The stop listener: turns signals, notices and calls of `request` into one stop request with a deadline.

    SIGTERM | notice | `request()`  →  StopListener  →  on_stop (the ranks agree on a boundary)  →  the training loop

It records the request and calls `on_stop` on its own thread. Everything that takes time happens elsewhere.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from queue import SimpleQueue

from reprieve.console import ONE_RANK
from reprieve.errors import ConfigError
from reprieve.preemption.deadline import Grace
from reprieve.preemption.notices import Notice, NoticePoller, detect_clouds
from reprieve.preemption.process_host import ProcessHost, StopRequest
from reprieve.preemption.signals import signal_watch

log = logging.getLogger("reprieve")


ANOTHER_RANK = "a stop request to another rank"
"""The reason on ranks that received no stop request from outside."""


class StopListener:
    """A receiver of stop requests, from `start` to `close`. The first counts; later ones can only move the deadline
    closer."""

    def __init__(
        self,
        on_stop: Callable[[], None],
        *,
        on_request: Callable[[], None] = lambda: None,
        on_deadline: Callable[[], None] = lambda: None,
        grace: Grace,
        signals: Iterable[int | str] = (signal.SIGTERM,),
        kill_wait: timedelta = timedelta(0),
        notices: str | Sequence[str] = "auto",
        host: ProcessHost | None = None,
    ) -> None:
        """All are called on the listener's thread: `on_request` once, as soon as there is a request; `on_stop` once,
        `kill_wait` later; `on_deadline` after that, whenever a later request has moved the deadline closer. `host`:
        where requests come from instead of signals and notices; it has waited already."""
        self.grace = grace if host is None else host.grace
        self.signals = tuple(map(signal_number, signals))
        self.stop: StopRequest | None = None
        self._on_request = on_request
        self._on_deadline = on_deadline
        self._announced = threading.Event()
        self._on_stop = on_stop
        self._kill_wait = kill_wait if host is None else timedelta(0)
        self._host = host
        self._requests: SimpleQueue[str | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="reprieve stop listener", daemon=True)
        # One process of a machine is enough: the ranks share stop requests.
        polls = host is None and os.environ.get("LOCAL_RANK", "0") == "0"
        clouds = detect_clouds(notices) if polls else ()
        self._pollers = [NoticePoller(cloud, self._noticed) for cloud in clouds]
        self.handles_signals = False

    def start(self) -> None:
        self._thread.start()
        if self._host is not None:
            self._host.subscribe(self._requested_by_host)
            self.handles_signals = True
            return
        self.handles_signals = signal_watch.subscribe(self.signals, self._signalled)
        if not self.handles_signals:
            log.info("not on the main thread, so signals do not stop this run: only notices and request() do")
        for poller in self._pollers:
            poller.start()

    def reassert_signals(self) -> None:
        """Call this now and then: see `SignalWatch.reassert`."""
        if self.handles_signals and self._host is None:
            signal_watch.reassert()

    def request(self, reason: str, *, deadline: float | None = None, number: int | None = None) -> None:
        """Request a stop. Callable from any thread and from a signal handler; returns at once."""
        now = time.monotonic()
        is_announced = deadline is not None
        certain = is_announced or self.grace.certain
        if deadline is None and self.grace.period is not None:
            deadline = now + self.grace.period.total_seconds()
        if (stop := self.stop) is None:
            # Two threads may be here at the same moment: then one of the two reasons is lost, and nothing else.
            self.stop = StopRequest(reason, now, deadline, certain, number)
            self._requests.put(reason)
        elif is_announced and deadline is not None and (stop.deadline is None or deadline < stop.deadline):
            self.stop = replace(stop, deadline=deadline, certain=True)
            self._requests.put(reason)

    def wait_until_announced(self, timeout_s: float) -> None:
        """Wait until the request is logged and reported, which the listener's thread does."""
        self._announced.wait(timeout_s)

    def call_previous_handler(self) -> None:
        """Call the script's own handler for the signal that came, now that everything is saved. A host's own handler
        would end its process."""
        number = self.stop.signal if self.stop is not None and self._host is None else None
        handler = signal_watch.previous_handler(number) if number is not None else None
        if handler is not None and number is not None and handler is not signal.default_int_handler:
            handler(number, None)

    def close(self) -> None:
        if self._host is not None:
            self._host.unsubscribe(self._requested_by_host)
        else:
            signal_watch.unsubscribe(self._signalled)
        self._requests.put(None)
        for poller in self._pollers:
            poller.close()

    def _signalled(self, number: int) -> None:
        # No log, no lock: this may run inside a signal handler.
        self.request(signal.Signals(number).name, number=number)

    def _requested_by_host(self, request: StopRequest) -> None:
        if (stop := self.stop) is None:
            self.stop = request
            self._requests.put(request.reason)
        else:
            self.stop = replace(stop, deadline=request.deadline, certain=request.certain)
            self._requests.put(request.reason)

    def _noticed(self, notice: Notice) -> None:
        if not notice.urgent:
            log.warning("%s: %s", notice.source, notice.reason, extra=ONE_RANK)
            return
        remaining_s = 0.0 if notice.deadline is None else (notice.deadline - datetime.now(timezone.utc)).total_seconds()
        # A deadline in the past is wrong, because the machine still runs: use the grace period.
        self.request(
            f"{notice.source}: {notice.reason}", deadline=time.monotonic() + remaining_s if remaining_s > 0 else None
        )

    def _serve(self) -> None:
        if (reason := self._requests.get()) is None:
            return
        if self._host is None:  # a host has logged it
            log.warning("stop requested: %s. Grace period: %s", reason, self.grace)
        self._on_request()
        self._announced.set()
        wait = self._kill_wait.total_seconds()
        if wait > 0:
            log.warning("training continues for %g s before saving (kill_wait)", wait)
            threading.Event().wait(wait)
        self._on_stop()
        while self._requests.get() is not None:
            self._on_deadline()


def signal_number(name: int | str) -> int:
    """Return the number of `"SIGUSR1"`, `"USR1"` or a number, if a process can handle that signal."""
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
