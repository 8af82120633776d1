"""How the worker processes of DataLoaders end.

They ignore the signals that stop a run (worker_signals.py). So `Process.terminate` no longer ends them, and
multiprocessing would wait for them for ever at the exit of the program. They are ended here: asked first, then with
SIGKILL.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess

_ASK_S = 1.0
"""How long a worker may take to end when it is asked. An idle one takes milliseconds."""

_all: weakref.WeakSet[BaseProcess] = weakref.WeakSet()
_owner = 0
"""The process that `_all` belongs to: a fork has a copy, and must not kill its siblings."""


@contextlib.contextmanager
def noted(into: weakref.WeakSet[BaseProcess]) -> Iterator[None]:
    """Processes that start in here are put there, and are ended with this process at the latest."""
    before = set(multiprocessing.active_children())
    try:
        yield
    finally:
        for child in multiprocessing.active_children():
            if child.daemon and child not in before:
                into.add(child)
                _remember(child)


def end(children: Iterable[BaseProcess], ask: Callable[[], None]) -> None:
    """`ask` tells the workers to end, and may hang; it runs on a thread of its own."""
    left = [child for child in children if child.is_alive()]
    if not left:
        return
    with _no_alarm():
        asking = threading.Thread(target=ask, name="reprieve end workers", daemon=True)
        asking.start()
        deadline = time.monotonic() + _ASK_S
        waiting = {child.sentinel for child in left}
        while waiting and (rest := deadline - time.monotonic()) > 0:
            waiting -= set(wait(list(waiting), rest))
        _kill(child for child in left if child.sentinel in waiting)
        asking.join(_ASK_S)


@contextlib.contextmanager
def _no_alarm() -> Iterator[None]:
    """Torch raises an error in the main thread for each worker that was killed. These we kill ourselves."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, handler if handler is not None else signal.SIG_DFL)


def _kill(children: Iterable[BaseProcess]) -> None:
    killed = list(children)
    for child in killed:
        with contextlib.suppress(ProcessLookupError):
            child.kill()
    for child in killed:
        child.join(_ASK_S)


def _remember(child: BaseProcess) -> None:
    global _owner  # noqa: PLW0603
    if _owner != os.getpid():
        # Handlers run in the order last in, first out: this one before multiprocessing's, which would wait.
        atexit.register(_at_exit)
        _owner = os.getpid()
        _all.clear()
    _all.add(child)


def _at_exit() -> None:
    # No thread may be started any more, and torch asks no more: there is only this way.
    if _owner == os.getpid():
        with _no_alarm():
            _kill(child for child in list(_all) if child.is_alive())
