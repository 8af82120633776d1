"""The workers of all DataLoaders of a protected process outlive the signals that stop it.

A scheduler, and torchrun, signal the whole process group. A process that has lost its workers cannot finish its step or
its evaluation, and would end with an error instead of a checkpoint. So workers start with these signals blocked, and
ignore them from then on, whatever they read: training data, evaluation data, or data for a loader that the script made
itself. `children.py` ends them.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import signal
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing.process import BaseProcess
from typing import Any

from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from reprieve.data.worker_processes import noted

_TORCHDATA = ("torchdata.stateful_dataloader.stateful_dataloader", "_StatefulMultiProcessingDataLoaderIter")
_PATCHED = "_reprieve_real_init"

_signals: Counter[int] = Counter()
"""Which signals are ignored, and how many sessions want that."""
_workers: weakref.WeakSet[BaseProcess] = weakref.WeakSet()
_fork_server = multiprocessing.forkserver.ForkServer()
"""For workers alone: its children inherit the signals that are blocked in it, and others' must not."""


def shield(signals: Iterable[int]) -> None:
    """Workers that start from now on ignore these signals."""
    _signals.update(signals)
    _patch(_MultiProcessingDataLoaderIter)
    if (module := sys.modules.get(_TORCHDATA[0])) is not None:
        _patch(getattr(module, _TORCHDATA[1]))


def unshield(signals: Iterable[int]) -> None:
    """One call of `shield` is over."""
    _signals.subtract(signals)


class _Ignoring:
    """Around a loader's `worker_init_fn`, after torch has set handlers of its own, in C."""

    def __init__(self, users: Callable[[int], None] | None, signals: Sequence[int]) -> None:
        self._users = users
        self._signals = signals

    def __call__(self, worker: int) -> None:
        for number in self._signals:
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self._signals)
        if self._users is not None:
            self._users(worker)


def _patch(iterator: Any) -> None:
    """A class whose instances start workers when they are made."""
    if hasattr(iterator, _PATCHED):
        return
    real = iterator.__init__

    @functools.wraps(real)
    def init(self: Any, loader: Any, *args: Any, **kwargs: Any) -> None:
        numbers = tuple(+_signals)
        if not numbers:
            real(self, loader, *args, **kwargs)
            return
        users, loader.worker_init_fn = loader.worker_init_fn, _Ignoring(loader.worker_init_fn, numbers)
        try:
            with noted(_workers), _blocked(numbers, loader.multiprocessing_context):
                real(self, loader, *args, **kwargs)
        finally:
            loader.worker_init_fn = users

    setattr(iterator, _PATCHED, real)
    iterator.__init__ = init


@contextlib.contextmanager
def _blocked(numbers: Sequence[int], context: Any) -> Iterator[None]:
    """Processes that start in here inherit the signals as blocked, however they are started."""
    method = (context or multiprocessing).get_start_method()
    if method != "fork":
        # The first start of the tracker, which others make, would unblock SIGTERM.
        multiprocessing.resource_tracker.ensure_running()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    others = multiprocessing.forkserver.connect_to_new_process
    try:
        if method == "forkserver":
            multiprocessing.forkserver.connect_to_new_process = _fork_server.connect_to_new_process
        yield
    finally:
        multiprocessing.forkserver.connect_to_new_process = others
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
