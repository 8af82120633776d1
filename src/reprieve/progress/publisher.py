"""Publishes the progress of a run to all sinks, beside training.

    Tracker ← snapshot ← one daemon thread per sink → Sink.update, …, Sink.close

Each sink has a thread, because a sink that hangs (a dead NFS server, an unresponsive controller) must block neither
training, nor the other sinks, nor the exit of the process.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from reprieve.progress.sinks.base import Sink
from reprieve.progress.sinks.factory import make_sinks
from reprieve.progress.snapshot import Progress
from reprieve.settings import Settings, resolve

log = logging.getLogger("reprieve")

_CLOSE_TIMEOUT_S = 1.0


class ProgressSource(Protocol):
    """What a publisher reads: a `Tracker`, or what another process has sent."""

    @property
    def ended(self) -> bool: ...

    def snapshot(self) -> Progress: ...

    def failed(self, reason: str) -> None:
        """Note that the run has ended without saying how."""


class Publisher:
    """Publishes from `start` to `close`, in the process of rank 0."""

    def __init__(self, tracker: ProgressSource, sinks: Sequence[Sink]) -> None:
        self._tracker = tracker
        self._feeds = [_Feed(sink, tracker.snapshot) for sink in sinks]
        self._pid = os.getpid()
        self._closed = False

    @classmethod
    def from_environment(
        cls,
        tracker: ProgressSource,
        settings: Settings | None = None,
        *,
        bar: bool = False,
        env: Mapping[str, str] = os.environ,
    ) -> Publisher:
        """Create a publisher with the sinks that settings and environment request. `settings`: if resolved already.
        `bar`: draw a progress bar on a terminal; False for frameworks that draw their own."""
        return cls(tracker, make_sinks(settings or resolve({}, env), env, bar=bar))

    def start(self) -> Publisher:
        for feed in self._feeds:
            feed.start()
        return self

    def close(self, timeout_s: float | None = None) -> None:
        """Publish the last snapshot and wait up to `timeout_s` (default: 1 s) for all sinks. Does nothing in a fork."""
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        if not self._tracker.ended:
            self._tracker.failed("the process ended before training was finished")
        until = time.monotonic() + (_CLOSE_TIMEOUT_S if timeout_s is None else timeout_s)
        for feed in self._feeds:
            feed.request_close()
        for feed in self._feeds:
            feed.join(max(0.0, until - time.monotonic()))

    def __enter__(self) -> Publisher:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.close()


class _Feed:
    """One sink and its thread."""

    def __init__(self, sink: Sink, snapshot: Callable[[], Progress]) -> None:
        self._sink = sink
        self._snapshot = snapshot
        self._closing = threading.Event()
        self._reported = False
        self._thread = threading.Thread(target=self._run, name=f"reprieve publishes to {sink.name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def request_close(self) -> None:
        self._closing.set()

    def join(self, timeout_s: float) -> None:
        if not self._thread.ident:
            return
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            log.warning("%s does not respond: it did not get the end of the run", self._sink.name)

    def _run(self) -> None:
        while not self._closing.is_set():
            self._call(self._sink.update)
            self._closing.wait(self._sink.every_s)
        self._call(self._sink.close)

    def _call(self, call: Callable[[Progress], None]) -> None:
        try:
            call(self._snapshot())
        except Exception as error:  # noqa: BLE001 - training continues, whatever the error
            if not self._reported:
                self._reported = True
                log.warning("cannot publish progress to %s: %s. Training continues", self._sink.name, _reason(error))


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
