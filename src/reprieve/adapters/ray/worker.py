"""A worker's part of a run: it hears of a stop, lets the training function save and unwind, and hands the process back.

    SIGTERM │ drained node │ cloud notice │ stopped driver
      ↓
    hold          the controller waits from now on: nothing counts as a failure
      ↓           (a bare SIGTERM: training continues for `kill_wait`)
    stop          a session in the function (`reprieve.ray.Run`, a Trainer) saves; without one, `should_checkpoint`
      ↓           becomes true and the next `ray.train.report` with a checkpoint ends the function (`reports.py`)
    Preempted     unwinds the function: temporary folders go, DataLoader workers end
      ↓
    hand back     all workers have unwound: the controller restarts the group, or ends the run for the driver

The process itself must not end: Ray would count that as a failure. The function's thread parks instead, outside any
collective, until Ray kills the process.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

from reprieve.adapters.ray import internals
from reprieve.adapters.ray.all_trainers import protect_transformers
from reprieve.adapters.ray.config import ResolvedConfig
from reprieve.adapters.ray.controller import generation_store
from reprieve.adapters.ray.messages import DRIVER_STOP, PARKED, SAVED, DriverStop, StoreAddress
from reprieve.adapters.ray.progress import ForwardingSink
from reprieve.adapters.ray.reports import UNWIND_LIMIT_S, ReportedCheckpoints
from reprieve.console import ONE_RANK, show_logs
from reprieve.data.workers import signals as worker_signals
from reprieve.errors import RanksError, ReprieveError
from reprieve.launcher_protocol import LAUNCHER_SOCKET
from reprieve.preemption.deadline import Grace
from reprieve.preemption.process_exit import Preempted, process_exit
from reprieve.preemption.process_host import StopRequest, StopRequestListener
from reprieve.preemption.stop_listener import StopListener
from reprieve.progress.sinks.factory import forward_to
from reprieve.ranks import discovery
from reprieve.ranks.group import Ranks
from reprieve.ranks.store import Store, prefixed
from reprieve.ranks.torch_store import TorchStore

log = logging.getLogger("reprieve")

CHECKPOINT_FOLDER = "reprieve"
"""The folder of our checkpoints, in Ray's folder of the run."""
_POLL_S = 0.1
_FOREVER = timedelta(days=3650)


class RayWorker:
    """The host of the training function in a worker: a `ProcessHost`."""

    def __init__(self, config: ResolvedConfig, store: Store, driver_store: Store) -> None:
        context = internals.worker_context()
        self._config = config
        self._store = store
        self._driver_store = driver_store
        self._rank = context.rank
        self._ranks = Ranks(
            context.rank, context.world_size, prefixed(store.client(), "worker") if context.world_size > 1 else None
        )
        self._lock = threading.Lock()
        self._listeners: list[StopRequestListener] = []
        self._stop: StopRequest | None = None
        """The request that was passed on: after `kill_wait`."""
        self._driver_stops = False
        self._wait_ended = threading.Event()
        """Something with a known course has followed a bare signal: `kill_wait` is over."""
        self.save_began: float | None = None
        """When the save was initiated, by `time.monotonic`; None: this worker did not learn of it by itself."""
        self._stopped = threading.Event()
        self._handed_back = threading.Event()
        self._shutting_down = False
        self.grace: Grace = config.grace
        self.reports = ReportedCheckpoints(self._ranks, self)
        self._stop_listener = StopListener(
            self._initiate,
            on_request=self._hold,
            on_deadline=self._deadline_moved,
            grace=config.grace,
            signals=config.signals,
        )
        self._preemption = internals.HeldPreemption.install(self._drained)

    def start(self) -> None:
        """Listen for stop requests. On the main thread of the worker."""
        numbers = self._stop_listener.signals
        # Ray's own handler would end the process. It comes back when Ray shuts the worker down.
        self._original_handlers = {number: signal.getsignal(number) for number in numbers}
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)
        self._stop_listener.start()
        worker_signals.shield(numbers)
        threading.Thread(target=self._wait_for_driver, name="reprieve driver stop", daemon=True).start()
        internals.wrap_train_function(self._guarded)
        internals.replace_report(self.reports.wrap)

    def close(self) -> None:
        """Ray shuts this worker down, and may signal it meanwhile."""
        self._shutting_down = True
        self._stop_listener.close()
        for number, handler in self._original_handlers.items():
            with contextlib.suppress(ValueError, TypeError):
                signal.signal(number, handler)

    # What sessions use: see `ProcessHost`

    @property
    def has_session(self) -> bool:
        """Whether a session in the function saves by itself."""
        return bool(self._listeners)

    @property
    def stop(self) -> StopRequest | None:
        return self._stop

    def subscribe(self, listener: StopRequestListener) -> None:
        with self._lock:
            self._listeners.append(listener)
            stop = self._stop
        if stop is not None:
            listener(stop)

    def unsubscribe(self, listener: StopRequestListener) -> None:
        with self._lock:
            if listener in self._listeners:
                self._listeners.remove(listener)

    def stopped(self, stopped: Preempted) -> None:
        """Log and publish what is saved."""
        with self._lock:
            if self._stopped.is_set():
                return
            self._stopped.set()
        if not stopped.saved or stopped.checkpoint is None:
            return
        with contextlib.suppress(ReprieveError):
            self._store.client().set(SAVED, str(stopped.step or 0).encode())
        if self._rank == 0:
            now = time.monotonic()
            took_s = now - (self.save_began or stopped.requested_at or now)
            log.warning("JIT checkpoint completed in %.1fs: step %s, %s", took_s, stopped.step, stopped.checkpoint)

    def hand_back(self) -> None:
        with self._lock:
            if self._handed_back.is_set():
                return
            self._handed_back.set()
        try:
            self._ranks.agree("hand back", limit=timedelta(seconds=UNWIND_LIMIT_S))
        except RanksError as error:
            log.warning("not all workers have left the training function: %s", error, extra=ONE_RANK)
        with contextlib.suppress(ReprieveError):
            self._store.client().add(PARKED, 1)
        if not self._driver_stops:
            self._preemption.release()

    def request_stop(self, reason: str) -> None:
        """A stop request reached another worker, which has waited for `kill_wait`."""
        self._wait_ended.set()
        self._stop_listener.request(reason)

    # From the request to the stop, on the stop listener's thread

    def _hold(self) -> None:
        if not self._shutting_down:
            self._preemption.hold()

    def _initiate(self) -> None:
        """Wait for `kill_wait`, if the request is a bare signal, then pass it on."""
        stop = self._stop_listener.stop
        assert stop is not None
        if self._shutting_down:
            return
        if stop.signal is not None:
            self._wait(stop)
        self.save_began = time.monotonic()
        self._pass_on(replace(self._stop_listener.stop or stop, signal=None))

    def _wait(self, stop: StopRequest) -> None:
        name, wait_s = signal.Signals(stop.signal or 0).name, self._config.kill_wait_s
        remaining_s = stop.remaining_s()
        if remaining_s is not None and wait_s > remaining_s / 2:
            wait_s = max(0.0, remaining_s / 2)
            log.warning(
                "kill_wait is cut short to %.1f s: the deadline is in %.1f s", wait_s, remaining_s, extra=ONE_RANK
            )
        log.warning("%s received, initiating JIT checkpoint in %.1fs", name, wait_s, extra=ONE_RANK)
        end = time.monotonic() + wait_s
        while (left_s := end - time.monotonic()) > 0 and not self._wait_ended.wait(min(left_s, _POLL_S)):
            if self._stop_listener.stop is not stop:  # a deadline was announced, as a cloud does it
                return

    def _pass_on(self, stop: StopRequest) -> None:
        with self._lock:
            self._stop = stop
            listeners = list(self._listeners)
        for listener in listeners:
            listener(stop)
        if not listeners:
            self.reports.request_stop()
        if stop.certain and (remaining_s := stop.remaining_s()) is not None:
            process_exit.schedule(max(0.0, remaining_s - 1))  # the function may never reach a point where it saves

    def _deadline_moved(self) -> None:
        """A later request, such as a drain, has moved the deadline closer."""
        assert self._stop_listener.stop is not None
        stop = replace(self._stop_listener.stop, signal=None)
        if stop != self._stop and not self._shutting_down:
            self._pass_on(stop)

    def _drained(self, deadline: float | None) -> None:
        """Ray drains a node of this run. `deadline`: in seconds since the epoch."""
        self._wait_ended.set()
        remaining_s = None if deadline is None else deadline - time.time()
        at = time.monotonic() + remaining_s if remaining_s is not None and remaining_s > 0 else None
        self._stop_listener.request("a node of the run is drained", deadline=at)

    def _wait_for_driver(self) -> None:
        with contextlib.suppress(ReprieveError):
            data = self._driver_store.wait(DRIVER_STOP, _FOREVER)
            if data is None:
                return
            stop = DriverStop.from_json(data)
            self._driver_stops = True
            self._wait_ended.set()
            remaining_s = stop.remaining_s()
            deadline = None if remaining_s is None else time.monotonic() + max(1.0, remaining_s)
            self._stop_listener.request(f"{stop.reason} to the driver", deadline=deadline)

    # Above the training function, on its thread

    def _guarded(self, target: Callable[[], Any]) -> Callable[[], Any]:
        """Wrap the training function: a stop ends it here, and nothing above sees it."""

        @functools.wraps(target)
        def run() -> Any:
            try:
                value = target()
                if not self._stopped.is_set():
                    return value
                # The function has caught the stop and returned. Ray would take the run for finished.
            except Preempted as stopped:
                self.stopped(stopped)
                stopped.__traceback__ = None  # it holds the frames of the function, and with them the model
            except BaseException as error:
                if not self._stopped.is_set():
                    raise
                log.warning("an error after the stop is ignored: %s: %s", type(error).__name__, error)
            finally:
                self.reports.finish()
            # Outside the except blocks, which hold the frames as well.
            self.hand_back()
            while True:
                threading.Event().wait()

        return run


_worker: RayWorker | None = None
"""The protection of this worker process."""


def protect_worker(config: ResolvedConfig, address: StoreAddress, generation: int) -> None:
    """Protect the training function that this worker is about to run. On its main thread."""
    global _worker  # noqa: PLW0603 - a process is one worker
    if _worker is not None:
        return
    context = internals.worker_context()
    set_environment(config, context)
    show_logs(context.rank)
    store = generation_store(address, generation)
    discovery.provide(context.rank, context.world_size, prefixed(store.client(), "job"))
    forward_to(ForwardingSink(store.client()))
    driver_store = prefixed(TorchStore(address.host, address.port), address.secret)
    _worker = process_exit.host = RayWorker(config, store, driver_store)
    _worker.start()
    protect_transformers()


def set_environment(config: ResolvedConfig, context: internals.WorkerContext) -> None:
    """Give this process the settings of the driver."""
    os.environ.pop(LAUNCHER_SOCKET, None)  # only the driver reports to the launcher
    os.environ.update(config.environment)
    os.environ["REPRIEVE_RUN"] = context.run_name
    # Of an object store as well, so that a Trainer refuses it: its own output_dir would be on this node alone.
    os.environ.setdefault("CHECKPOINT_URI", f"{context.folder or context.uri}/{CHECKPOINT_FOLDER}")


def release_worker() -> None:
    """Ray shuts this worker down."""
    if _worker is not None:
        _worker.close()


def should_checkpoint() -> bool:
    """Return whether to save a checkpoint now, because a stop was requested: true on all workers in the same call.

    Call it equally often on every worker, save a checkpoint where it is true, and pass it to `ray.train.report`: that
    call ends the training function once the checkpoint is committed. Outside Ray, and where the run is not protected,
    it is always false.
    """
    return _worker is not None and _worker.reports.should_checkpoint()
