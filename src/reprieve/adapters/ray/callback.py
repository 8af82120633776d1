"""The callback that brings Reprieve into Ray's processes: it travels from the driver to the controller, to the workers.

    driver      made here, pickled by `fit()`
    controller  after_controller_start … after_worker_group_poll_status …    → `RunController`
    worker      pickled again for each generation; after_init_train_context  → `worker.protect_worker`

A *generation* is one start of the group of workers. Ray pickles the callback several times; only the object in the
controller that gets `after_controller_start` is live, and its copies in the workers know the address of its store.
"""

from __future__ import annotations

import uuid
from typing import Any

from reprieve.adapters.ray import internals, snapshot
from reprieve.adapters.ray.config import JITCheckpointConfig, ResolvedConfig, resolve_config
from reprieve.adapters.ray.controller import RunController
from reprieve.adapters.ray.messages import StoreAddress
from reprieve.adapters.ray.node_check import check_nodes
from reprieve.session.startup_errors import reporting_startup_errors


class JITCheckpointCallback(
    internals.ControllerCallback,
    internals.WorkerGroupCallback,
    internals.ReportCallback,
    internals.WorkerCallback,
):
    """Protects one run. `RAY_TRAIN_CALLBACKS=reprieve.ray.JITCheckpointCallback` protects without code."""

    def __init__(self, config: JITCheckpointConfig | None = None) -> None:
        self.run_id = uuid.uuid4().hex
        with reporting_startup_errors():
            self.config: ResolvedConfig = resolve_config(config or JITCheckpointConfig(enabled=True))
        self._address: StoreAddress | None = None
        self._generation = 0
        self._controller: RunController | None = None
        self._protects = True
        """False: another callback protects this run."""
        if config is None:
            # Ray makes this object inside `fit()`, where it is too late to wrap that call.
            from reprieve.adapters.ray.driver import watch_running_fit

            self._protects = watch_running_fit(self)

    def begin_run(self) -> None:
        """A `RunConfig` may be used for several `fit()`s. What is left of the one before must not be taken for this."""
        self.run_id = uuid.uuid4().hex

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_controller": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        # In the controller this runs before Ray loads its snapshot. No hook does.
        snapshot.guard_snapshots()

    # In the controller, on its event loop: nothing here may block

    def after_controller_start(self, train_run_context: Any) -> None:
        if self._protects:
            self._controller = RunController.start(self.run_id, self.config)
        if self._controller is not None:
            self._controller.claim(internals.run_folder(train_run_context))
            self._controller.progress.resumed_from = snapshot.resumed_step(
                internals.RunStorage.of_run(train_run_context)
            )
            self._address = self._controller.address

    def before_worker_group_start(self, worker_group_context: Any) -> None:
        if self._controller is not None:
            self._generation = self._controller.begin_generation(worker_group_context.num_workers)

    def before_init_train_context(self, workers: list[Any]) -> dict[str, list[Any]]:
        if self._controller is not None:
            self._controller.raise_if_nothing_to_save()
            check_nodes(workers)
        return {}

    def after_worker_group_start(self, worker_group: Any) -> None:
        if self._controller is not None:
            self._controller.raise_if_nothing_to_save()

    def after_worker_group_poll_status(self, worker_group_status: Any) -> None:
        if self._controller is not None:
            self._controller.polled()

    def after_report(self, training_report: Any, metrics: list[dict[str, Any]]) -> None:
        if self._controller is not None:
            checkpoint = training_report.checkpoint
            self._controller.progress.reported(metrics[0] or {}, checkpoint.path if checkpoint else None)

    def after_controller_finish(self, result: Any) -> None:
        if self._controller is not None:
            self._controller.finished(result.error)

    async def before_controller_shutdown(self) -> None:
        if self._controller is not None:
            self._controller.release()

    def before_controller_abort(self) -> None:
        if self._controller is not None:
            self._controller.aborted()

    # In a worker, on its main thread

    def after_init_train_context(self) -> None:
        if self._address is not None:
            from reprieve.adapters.ray.worker import protect_worker

            protect_worker(self.config, self._address, self._generation)

    def before_worker_shutdown(self) -> None:
        if self._address is not None:
            from reprieve.adapters.ray.worker import release_worker

            release_worker()
