"""The driver's part of a run: SIGTERM during `fit()` stops the whole run, and `fit()` never returns from it.

    SIGTERM │ reprieve pause │ ray job stop
      ↓
    the store of the controller    all workers save and park (`worker.py`)
      ↓
    DriverStopped                  raised in the controller, and so by `fit()`
      ↓
    Preempted                      exit code 143; nothing behind `fit()` runs

The same name and storage path resume the run.
"""

from __future__ import annotations

import functools
import logging
import os
import re
import threading
import time
import weakref
from contextvars import ContextVar
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import ray

from reprieve.adapters.ray import internals
from reprieve.adapters.ray.config import JITCheckpointConfig
from reprieve.adapters.ray.controller import DriverStopped
from reprieve.adapters.ray.launcher_reports import LauncherReports
from reprieve.adapters.ray.messages import DRIVER_STOP, DriverStop, StoreAddress, stop_key, store_key
from reprieve.console import show_logs
from reprieve.errors import ConfigError, is_permanent
from reprieve.preemption.process_exit import Preempted, process_exit
from reprieve.preemption.stop_listener import StopListener
from reprieve.ranks.store import Store, prefixed
from reprieve.ranks.torch_store import TorchStore
from reprieve.session.startup_errors import reporting_startup_errors

if TYPE_CHECKING:
    from reprieve.adapters.ray.callback import JITCheckpointCallback

log = logging.getLogger("reprieve")

T = TypeVar("T")

_EXIT_S = 30.0
"""How long the driver may take to exit after `fit()`: shutting down a local cluster takes up to 12 s."""
_POLL_S = 0.1
_CONNECT_LIMIT = timedelta(seconds=5)
_is_guarded: ContextVar[bool] = ContextVar("reprieve_is_guarded", default=False)
"""A guard watches the `fit()` that runs on this thread."""
_DEFAULT_NAME = re.compile(r"ray_train_run-\d{4}-\d\d-\d\d_")


def protect(trainer: T, config: JITCheckpointConfig | None = None) -> T:
    """Protect a trainer that has a plain `RunConfig`; return it."""
    config = config or JITCheckpointConfig(enabled=True)
    if config.enabled:
        add_callback(trainer.run_config, config)  # type: ignore[attr-defined]
    return trainer


def add_callback(run_config: Any, config: JITCheckpointConfig) -> None:
    """Protect the runs with this `RunConfig`, once."""
    from reprieve.adapters.ray.callback import JITCheckpointCallback

    if not any(isinstance(each, JITCheckpointCallback) for each in run_config.callbacks):
        run_config.callbacks = [*run_config.callbacks, JITCheckpointCallback(config)]
    wrap_fit()


def wrap_fit() -> None:
    """Let `fit()` watch for stops, for trainers that are protected."""
    original = internals.DataParallelTrainer.fit
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def fit(trainer: Any) -> Any:
        from reprieve.adapters.ray.callback import JITCheckpointCallback

        callbacks = [each for each in trainer.run_config.callbacks if isinstance(each, JITCheckpointCallback)]
        if not callbacks:
            return original(trainer)
        with reporting_startup_errors():
            _check(trainer)
        callbacks[0].begin_run()
        if not ray.is_initialized():
            ray.init()  # as `fit()` does; later, it would replace our signal handler
        with DriverGuard(callbacks[0], _folder(trainer)):
            token = _is_guarded.set(True)
            try:
                return original(trainer)
            finally:
                _is_guarded.reset(token)

    internals.DataParallelTrainer.fit = fit  # type: ignore[assignment, method-assign]


def watch_running_fit(callback: JITCheckpointCallback) -> bool:
    """Watch for stops in a `fit()` that is running already, until it ends. Returns whether this callback protects it:
    another one may do so."""
    if _is_guarded.get():
        return False
    wrap_fit()
    watching = DriverGuard(callback, "").__enter__()
    # That `fit()` cannot be wrapped any more. It holds the only references to its callbacks, so they end with it.
    weakref.finalize(callback, watching.close).atexit = False
    return True


def _folder(trainer: Any) -> str:
    """Ray's folder of the run."""
    return f"{trainer.run_config.storage_path.rstrip('/')}/{trainer.run_config.name}"


def _check(trainer: Any) -> None:
    if trainer.scaling_config.num_workers == 0:
        raise ConfigError(
            "num_workers=0 runs the training function in the driver, where Ray has no worker to stop or restart. Use "
            "ScalingConfig(num_workers=1), or reprieve.Run without Ray"
        )
    if _has_no_name(trainer.run_config.name or ""):
        log.warning(
            "this run has no name: if its driver stops, the next one starts over. Use RunConfig(name=…, storage_path=…)"
        )


def _has_no_name(name: str) -> bool:
    """Whether Ray made this name, from the time of the start."""
    return _DEFAULT_NAME.match(name) is not None


class DriverGuard:
    """Watches for stops while `fit()` runs."""

    def __init__(self, callback: JITCheckpointCallback, folder: str) -> None:
        """`folder`: Ray's folder of the run."""
        self._run_id = callback.run_id
        self._folder = folder
        self._ended = threading.Event()
        self._reports: LauncherReports | None = None
        self._stop_listener = StopListener(
            self._stop,
            on_request=self._report_stop,
            grace=callback.config.grace,
            signals=callback.config.signals,
            notices="off",  # the workers look for them
        )

    def __enter__(self) -> DriverGuard:
        show_logs()
        process_exit.prepare()
        for name, value in internals.POLL_INTERVALS_S.items():
            os.environ.setdefault(name, value)
        self._reports = LauncherReports(self._folder, self._connect)
        self._stop_listener.start()
        if not self._stop_listener.handles_signals:
            log.warning("fit() runs outside the main thread: SIGTERM stops workers, but not this driver")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *at: object) -> None:
        stop = self._stop_listener.stop
        self.close()
        assert self._reports is not None
        if isinstance(error, DriverStopped):
            self._reports.stopped(error.saved_step, starts_over=_has_no_name(self._folder.rpartition("/")[2]))
            process_exit.schedule(_EXIT_S)
            reason = stop.reason if stop is not None else error.reason
            raise Preempted(reason, step=error.saved_step, saved=error.saved_step is not None) from None
        if error is None:
            self._reports.finished()
        if error is not None and is_permanent(cause := internals.cause_of(error)):
            with reporting_startup_errors():
                raise cause from error  # no restart helps: exit code 42

    def close(self) -> None:
        """Watch no more: `fit()` has ended."""
        self._ended.set()
        self._stop_listener.close()
        if self._reports is not None:
            self._reports.close()

    def _report_stop(self) -> None:
        if self._reports is not None and self._stop_listener.stop is not None:
            self._reports.stopping(self._stop_listener.stop.reason)

    def _stop(self) -> None:
        """Pass the stop on to the controller. On the stop listener's thread."""
        stop = self._stop_listener.stop
        assert stop is not None
        remaining_s = stop.remaining_s() if stop.certain else None
        if remaining_s is not None:
            process_exit.schedule(remaining_s - 0.5, why="the grace period is over:", decided=False)
        message = DriverStop(reason=stop.reason, deadline=None if remaining_s is None else time.time() + remaining_s)
        try:
            # A controller that is only just starting sees this one; it publishes its store before it looks.
            internals.put_key(stop_key(self._run_id), message.to_json())
            while (store := self._connect()) is None:
                if self._ended.wait(_POLL_S):
                    return
            store.set(DRIVER_STOP, message.to_json())
            store.close()
        except Exception as error:  # noqa: BLE001 - whatever it is, this process must end
            if not self._ended.is_set():
                log.warning("the controller of this run cannot be reached, so nothing is saved: %s", error)
                process_exit.exit_now()

    def _connect(self) -> Store | None:
        """Return the store of the run, or None where the controller does not serve it yet."""
        if (data := internals.get_key(store_key(self._run_id))) is None:
            return None
        address = StoreAddress.from_json(data)
        return prefixed(TorchStore(address.host, address.port, limit=_CONNECT_LIMIT), address.secret)
