"""Ends the worker processes of DataLoaders.

Workers ignore the signals that stop a run (workers/signals.py). So `Process.terminate` does not end them, and
multiprocessing would wait for them forever at the exit of the program. This module asks them to exit, and sends SIGKILL
to those that do not.
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

EXIT_TIMEOUT_S = 1.0
"""How long a worker may take to exit on request. An idle one takes milliseconds."""

_tracked: weakref.WeakSet[BaseProcess] = weakref.WeakSet()
_parent_pid = 0
"""The process that started the workers in `_tracked`: a fork has a copy of both, and must not kill its siblings."""


@contextlib.contextmanager
def track_children(into: weakref.WeakSet[BaseProcess]) -> Iterator[None]:
    """Add the daemon processes that start in this block to `into`. They end with this process at the latest."""
    before = set(multiprocessing.active_children())
    try:
        yield
    finally:
        for child in multiprocessing.active_children():
            if child.daemon and child not in before:
                into.add(child)
                _kill_at_exit(child)


def end_processes(children: Iterable[BaseProcess], request_exit: Callable[[], None]) -> None:
    """End processes. `request_exit` asks them to exit. It may hang, so it runs on a thread of its own."""
    running = [child for child in children if child.is_alive()]
    if not running:
        return
    with _ignore_dead_workers():
        thread = threading.Thread(target=request_exit, name="reprieve end workers", daemon=True)
        thread.start()
        deadline = time.monotonic() + EXIT_TIMEOUT_S
        sentinels = {child.sentinel for child in running}
        while sentinels and (remaining_s := deadline - time.monotonic()) > 0:
            sentinels -= set(wait(list(sentinels), remaining_s))
        _kill(child for child in running if child.sentinel in sentinels)
        thread.join(EXIT_TIMEOUT_S)


@contextlib.contextmanager
def _ignore_dead_workers() -> Iterator[None]:
    """Keep torch's SIGCHLD handler from raising an error in the main thread for workers that we kill."""
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
        child.join(EXIT_TIMEOUT_S)


def _kill_at_exit(child: BaseProcess) -> None:
    global _parent_pid  # noqa: PLW0603
    if _parent_pid != os.getpid():
        # Handlers run last in, first out: this one runs before multiprocessing's, which would wait.
        atexit.register(_kill_tracked)
        _parent_pid = os.getpid()
        _tracked.clear()
    _tracked.add(child)


def _kill_tracked() -> None:
    # At exit no thread can be started, and torch no longer asks its workers to exit.
    if _parent_pid == os.getpid():
        with _ignore_dead_workers():
            _kill(child for child in list(_tracked) if child.is_alive())
