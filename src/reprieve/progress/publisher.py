"""Tells a run's progress to all sinks, beside training.

    Tracker ← snapshot ← one daemon thread a sink → Sink.update, …, Sink.close

A thread for each, because one that hangs (a dead NFS server, a controller that does not answer) must hold up neither
training, nor the other sinks, nor the end of the process.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from reprieve.progress.sinks.base import Sink
from reprieve.progress.sinks.factory import make_sinks
from reprieve.progress.snapshot import Progress
from reprieve.progress.tracker import Tracker
from reprieve.settings import Settings, resolve

log = logging.getLogger("reprieve")

_CLOSE_S = 1.0


class Publisher:
    """From `start` to `close`. For the process that speaks for the run: rank 0."""

    def __init__(self, tracker: Tracker, sinks: Sequence[Sink]) -> None:
        self._tracker = tracker
        self._feeds = [_Feed(one, tracker.snapshot) for one in sinks]
        self._pid = os.getpid()
        self._closed = False

    @classmethod
    def from_environment(
        cls,
        tracker: Tracker,
        settings: Settings | None = None,
        *,
        bar: bool = False,
        env: Mapping[str, str] = os.environ,
    ) -> Publisher:
        """With the sinks that were asked for. `settings`: as resolved already. `bar`: draw one, if there is a terminal;
        whoever has a bar of its own says no."""
        return cls(tracker, make_sinks(settings or resolve({}, env), env, bar=bar))

    def start(self) -> Publisher:
        for one in self._feeds:
            one.start()
        return self

    def close(self, within_s: float | None = None) -> None:
        """The last word to all sinks, and not much longer than `within_s`, a second. In a forked child: nothing."""
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        if not self._tracker.ended:
            self._tracker.failed("it ended before it was finished")
        until = time.monotonic() + (_CLOSE_S if within_s is None else within_s)
        for one in self._feeds:
            one.ask_to_close()
        for one in self._feeds:
            one.join(max(0.0, until - time.monotonic()))

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
        self._thread = threading.Thread(target=self._run, name=f"reprieve tells {sink.name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def ask_to_close(self) -> None:
        self._closing.set()

    def join(self, within_s: float) -> None:
        if not self._thread.ident:
            return
        self._thread.join(within_s)
        if self._thread.is_alive():
            log.warning("%s was not told how the run ended: it does not answer", self._sink.name)

    def _run(self) -> None:
        while not self._closing.is_set():
            self._tell(self._sink.update)
            self._closing.wait(self._sink.every_s)
        self._tell(self._sink.close)

    def _tell(self, call: Callable[[Progress], None]) -> None:
        try:
            call(self._snapshot())
        except Exception as error:  # noqa: BLE001 - whatever it is, training goes on
            if not self._reported:
                self._reported = True
                log.warning("progress cannot be told to %s: %s. Training goes on", self._sink.name, _reason(error))


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
