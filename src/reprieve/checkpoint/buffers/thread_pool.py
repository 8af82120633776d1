"""A thread pool that also works while the interpreter exits.

The pools of `concurrent.futures` accept no work once the interpreter is exiting, so a background save that is being
written at that time would be lost. The threads here are ordinary ones: the interpreter waits for them. They start when
there is work and end when there is none.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

_LINGER_S = 0.05
"""How long an idle thread waits for work before it ends: longer than the gap between two blocks of a save."""


class ThreadPool:
    """Up to `count` threads that run submitted functions in order."""

    def __init__(self, count: int, name: str) -> None:
        self._count = count
        self._name = name
        self._work: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._changed = threading.Condition()
        self._threads: set[threading.Thread] = set()
        self._idle = 0

    def submit(self, work: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        with self._changed:
            self._work.append((future, work))
            if self._idle < len(self._work) and len(self._threads) < self._count:
                thread = threading.Thread(target=self._run, name=self._name, daemon=False)
                self._threads.add(thread)
                thread.start()
            else:
                self._changed.notify()
        return future

    def join(self) -> None:
        """Wait until all work is done and all threads have ended."""
        with self._changed:
            self._changed.notify_all()
            threads = list(self._threads)
        for thread in threads:
            thread.join()

    def _run(self) -> None:
        while (item := self._next()) is not None:
            future, work = item
            try:
                result = work()
            except BaseException as error:  # noqa: BLE001 - `Future.result` raises it
                future.set_exception(error)
            else:
                future.set_result(result)
            del item, future, work  # an idle thread must not keep blocks and tensors alive

    def _next(self) -> tuple[Future[Any], Callable[[], Any]] | None:
        with self._changed:
            if not self._work:
                self._idle += 1
                self._changed.wait(_LINGER_S)
                self._idle -= 1
            if self._work:
                return self._work.popleft()
            self._threads.discard(threading.current_thread())
            return None
