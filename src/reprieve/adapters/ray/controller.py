"""The controller's part of a run: it serves the store of all generations, and ends the run when the driver must stop.

The controller lives as long as the driver, and longer than any worker. Its hooks run on Ray's event loop, which also
answers polls and commits checkpoints: nothing here may block.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import ray.util

from reprieve import exit_codes
from reprieve.adapters.ray import internals
from reprieve.adapters.ray.config import ResolvedConfig
from reprieve.adapters.ray.messages import DRIVER_STOP, PARKED, SAVED, DriverStop, StoreAddress, stop_key, store_key
from reprieve.adapters.ray.progress import RunProgress
from reprieve.adapters.ray.run_folder import claim_run_folder
from reprieve.checkpoint.folder.lease import FolderLease
from reprieve.console import show_logs
from reprieve.errors import ReprieveError
from reprieve.launcher_protocol import LAUNCHER_SOCKET
from reprieve.progress.failure_reason import reason as failure_reason
from reprieve.ranks.store import Store, prefixed
from reprieve.ranks.torch_store import TorchStore
from reprieve.run_state import RunState

log = logging.getLogger("reprieve")

_FOREVER = timedelta(days=3650)


class DriverStopped(internals.ControllerError, SystemExit):
    """Raised in the controller, and by `fit()` in the driver: the run was stopped, and resumes at its next start.

    Ray keeps a `ControllerError` as it is on its way to the driver, where a `SystemExit` exits with its code.
    """

    def __init__(self, controller_failure: Exception, saved_step: int | None = None) -> None:
        super().__init__(controller_failure)
        self.code = exit_codes.PREEMPTED
        self.reason = str(controller_failure)
        self.saved_step = saved_step
        """The last step, if the workers have saved it at this stop."""

    def __str__(self) -> str:
        saved = "nothing new is saved" if self.saved_step is None else f"step {self.saved_step} is saved"
        return f"the run is stopped: {self.reason}; {saved}. The same name and storage path resume it"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.controller_failure, self.saved_step)


class RunController:
    """The live part of the callback, in the controller."""

    _running: RunController | None = None
    """The first of several callbacks protects the run; the others do nothing."""

    def __init__(self, run_id: str, config: ResolvedConfig) -> None:
        self._run_id = run_id
        self._config = config
        self._generation = 0
        self._workers = 0
        self._driver_stop: DriverStop | None = None
        self._saved_step: int | None = None
        """The step that the workers have saved at the end of their generation; None: they saved none at its end."""
        self._lease: FolderLease | None = None
        secret = secrets.token_hex(16)
        self._server = TorchStore.serve(ray.util.get_node_ip_address())
        self.address = StoreAddress(host=self._server.host, port=self._server.port, secret=secret)
        self._store: Store = prefixed(self._server, secret)
        self.progress = RunProgress(config, self._store)
        threading.Thread(target=self._wait_for_driver, name="reprieve driver stop", daemon=True).start()
        internals.put_key(store_key(run_id), self.address.to_json())
        if (stop := internals.get_key(stop_key(run_id))) is not None:  # it came before there was a store
            self._driver_stop = DriverStop.from_json(stop)

    @classmethod
    def start(cls, run_id: str, config: ResolvedConfig) -> RunController | None:
        """Protect the run of this controller; None: another callback does already."""
        if cls._running is not None:
            return None
        os.environ.pop(LAUNCHER_SOCKET, None)  # only the driver reports to the launcher
        show_logs(0)
        internals.log_briefly(DriverStopped)
        cls._running = cls(run_id, config)
        return cls._running

    def claim(self, folder: Path | None) -> None:
        """Refuse to run beside another live run of this name. At the start, where waiting for it delays nothing."""
        if folder is not None:
            self._lease = claim_run_folder(folder)

    def release(self) -> None:
        """The run ends: let the next one start at once."""
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.release()

    def begin_generation(self, workers: int) -> int:
        """Return the number of the generation that starts now."""
        self._read_saved_step()
        self.raise_if_nothing_to_save()
        self._generation += 1
        self._workers = workers
        self.progress.generation_started(self._generation)
        return self._generation

    def raise_if_nothing_to_save(self) -> None:
        """End the run if the driver must stop. Only while no worker trains."""
        if self._driver_stop is not None:
            raise self._stopped(self._driver_stop)

    def polled(self) -> None:
        """After each poll of the workers: end the run once the driver must stop and all workers are ready for it."""
        stop = self._driver_stop
        if stop is None:
            return
        remaining_s = stop.remaining_s()
        is_late = remaining_s is not None and remaining_s < 1
        if is_late or int(self._read(PARKED) or 0) >= self._workers:
            if is_late:
                log.error("not all workers have saved before the deadline of the driver: the run ends now")
            self._read_saved_step()
            raise self._stopped(stop)

    def finished(self, error: BaseException | None) -> None:
        """The run has ended. `error`: what has ended it before training was complete."""
        if error is None:
            self.progress.close(RunState.FINISHED)
        elif not isinstance(error, DriverStopped):  # that one was published as a stop
            self.progress.close(RunState.FAILED, failure_reason(internals.cause_of(error)))

    def aborted(self) -> None:
        """Ray ends the run without an error, at Ctrl-C."""
        self.progress.close(RunState.FAILED, "the run was aborted")
        self.release()

    def _stopped(self, stop: DriverStop) -> DriverStopped:
        self.progress.close(RunState.STOPPED, stop.reason)
        return DriverStopped(RuntimeError(stop.reason), self._saved_step)

    def _read_saved_step(self) -> None:
        saved = self._read(SAVED)
        self._saved_step = int(saved) if saved is not None else None

    def _read(self, key: str) -> bytes | None:
        """Read a key of the current generation."""
        with contextlib.suppress(ReprieveError):
            return self._store.get(f"{self._generation}/{key}")
        return None

    def _wait_for_driver(self) -> None:
        with contextlib.suppress(ReprieveError):
            data = self._store.client().wait(DRIVER_STOP, _FOREVER)
            if data is not None:
                self._driver_stop = DriverStop.from_json(data)


def generation_store(address: StoreAddress, generation: int) -> Any:
    """Connect a worker to the store of its generation."""
    store = TorchStore(address.host, address.port)
    return prefixed(store, f"{address.secret}/{generation}")
