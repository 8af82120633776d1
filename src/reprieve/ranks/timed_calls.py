"""A thread for calls that may block forever, so that callers wait only for a limited time.

A hung network file system has no time limit: when its server is gone, a call never returns. Then it is this thread that
hangs, and nothing waits for it.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout  # its own class before Python 3.11
from datetime import timedelta
from typing import Any, TypeVar

from reprieve.errors import StoreLost

T = TypeVar("T")

_Queue = queue.SimpleQueue[tuple["Future[Any]", Callable[[], Any]] | None]


class TimedCaller:
    """A thread that runs one call at a time, in order."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._lost: str | None = None
        self._queue: _Queue = queue.SimpleQueue()
        # The thread holds the queue, not this object: it ends when the object is no longer used.
        threading.Thread(target=_run, args=(self._queue,), name=f"reprieve {name}", daemon=True).start()
        self._end_thread = weakref.finalize(self, self._queue.put, None)

    def run(self, call: Callable[[], T], limit: timedelta) -> T:
        """Run `call` and return its result. If it takes longer than the limit, this and every later call raise
        `StoreLost`."""
        if self._lost is not None:
            raise StoreLost(self._lost)
        future: Future[T] = Future()
        self._queue.put((future, call))
        try:
            return future.result(limit.total_seconds())
        except FutureTimeout:
            if future.done():  # the call itself raised it
                raise
            raise StoreLost(self.lose(f"no answer within {limit.total_seconds():g} s")) from None
        finally:
            del future  # it holds an exception whose traceback holds this frame

    def lose(self, reason: str) -> str:
        """Let every later call fail at once. Returns the message that it fails with."""
        self._lost = self._lost or f"the {self.name} that the ranks communicate through is lost: {reason}"
        return self._lost

    def close(self) -> None:
        self.lose("it was closed here")
        self._end_thread()


def _run(calls: _Queue) -> None:
    while (item := calls.get()) is not None:
        future, call = item
        try:
            future.set_result(call())
        except BaseException as error:  # noqa: BLE001 - raised where the result is waited for
            future.set_exception(error)
        del item, future, call
