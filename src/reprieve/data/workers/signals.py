"""Keeps the signals that stop a run away from the workers of all DataLoaders of a protected process.

A scheduler, and torchrun, signal the whole process group. A process that has lost its workers cannot finish its step or
its evaluation, and would end with an error instead of a checkpoint. So workers start with these signals blocked, and
ignore them from then on, whatever they read: training data, evaluation data, or data for a loader that the script made
itself. `workers/processes.py` ends them.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import signal
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing.process import BaseProcess
from types import ModuleType
from typing import Any

from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from reprieve.data.workers.processes import track_children
from reprieve.import_hooks import call_when_imported

_TORCHDATA = "torchdata.stateful_dataloader.stateful_dataloader"
_PATCHED = "_reprieve_real_init"

_signals: Counter[int] = Counter()
"""How many sessions shield their workers from each signal."""
_workers: weakref.WeakSet[BaseProcess] = weakref.WeakSet()
_fork_server = multiprocessing.forkserver.ForkServer()
"""A fork server for workers only: its children inherit the signals that are blocked in it, and children of other fork
servers must not."""


def shield(signals: Iterable[int]) -> None:
    """Let workers that start from now on ignore these signals."""
    _signals.update(signals)
    if not hasattr(_MultiProcessingDataLoaderIter, _PATCHED):
        _patch(_MultiProcessingDataLoaderIter)
        call_when_imported({_TORCHDATA: f"{__name__}:patch_torchdata"})  # perhaps not before its first loader is made


def unshield(signals: Iterable[int]) -> None:
    """Undo one call of `shield`."""
    _signals.subtract(signals)


def patch_torchdata(module: ModuleType) -> None:
    """Shield the workers of torchdata's loaders, too, once its module was imported."""
    _patch(module._StatefulMultiProcessingDataLoaderIter)


class _SignalIgnoringInit:
    """The user's `worker_init_fn`, after ignoring signals. It runs after torch has set its own handlers, in C."""

    def __init__(self, users_init: Callable[[int], None] | None, signals: Sequence[int]) -> None:
        self._users_init = users_init
        self._signals = signals

    def __call__(self, worker: int) -> None:
        for number in self._signals:
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self._signals)
        if self._users_init is not None:
            self._users_init(worker)


def _patch(iterator_class: Any) -> None:
    """Patch a class whose instances start workers in `__init__`."""
    real = iterator_class.__init__

    @functools.wraps(real)
    def init(self: Any, loader: Any, *args: Any, **kwargs: Any) -> None:
        numbers = tuple(+_signals)
        if not numbers:
            real(self, loader, *args, **kwargs)
            return
        users_init = loader.worker_init_fn
        loader.worker_init_fn = _SignalIgnoringInit(users_init, numbers)
        try:
            with track_children(_workers), _blocked(numbers, loader.multiprocessing_context):
                real(self, loader, *args, **kwargs)
        finally:
            loader.worker_init_fn = users_init

    setattr(iterator_class, _PATCHED, real)
    iterator_class.__init__ = init


@contextlib.contextmanager
def _blocked(numbers: Sequence[int], context: Any) -> Iterator[None]:
    """Block signals in processes that start in this block, whatever their start method."""
    method = (context or multiprocessing).get_start_method()
    if method != "fork":
        # Starting the tracker unblocks SIGTERM, so it has to run before the signals are blocked.
        multiprocessing.resource_tracker.ensure_running()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    stock_connect = multiprocessing.forkserver.connect_to_new_process
    try:
        if method == "forkserver":
            multiprocessing.forkserver.connect_to_new_process = _fork_server.connect_to_new_process
        yield
    finally:
        multiprocessing.forkserver.connect_to_new_process = stock_connect
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
