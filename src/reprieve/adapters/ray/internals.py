"""All that is private in Ray: its callbacks, a worker's context, the controller's snapshot. Nothing else imports it.

Ray may change these names in any release. So a version that was not tested is refused, with a way to try it.
"""

from __future__ import annotations

import functools
import logging
import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray
import ray.train
from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_put

from reprieve.errors import ConfigError
from reprieve.session.startup_errors import reporting_startup_errors

OLDEST, NEWEST = (2, 58), (2, 60)
"""The first and the last minor version of Ray that has all names below. The tests run on the last (`make test-ray`)."""
TRY_UNTESTED = "REPRIEVE_UNTESTED_RAY"
"""The environment variable that allows other versions."""


def check_version(version: str = ray.__version__) -> None:
    """Refuse a version of Ray that was not tested."""
    found = re.match(r"(\d+)\.(\d+)", version)
    minor = (int(found[1]), int(found[2])) if found else (0, 0)
    if minor < OLDEST:
        raise ConfigError(
            f"Ray {version} is too old for reprieve.ray: it has no preemption of its own to build on. Use "
            f"{_text(OLDEST)} to {_text(NEWEST)}: pip install 'reprieve[ray]'"
        )
    if minor > NEWEST and not os.environ.get(TRY_UNTESTED):
        raise ConfigError(
            f"Ray {version} is newer than {_text(NEWEST)}, the newest that reprieve.ray was tested with. Install that, "
            f"a newer Reprieve, or set {TRY_UNTESTED}=1 to try"
        )
    if os.environ.get("RAY_TRAIN_V2_ENABLED", "1").lower() in ("0", "false"):
        raise ConfigError("reprieve.ray needs Ray Train V2: remove RAY_TRAIN_V2_ENABLED=0 from the environment")


def _text(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


with reporting_startup_errors():
    check_version()

from ray.train.v2._internal.constants import (  # noqa: E402 - only in versions that were tested
    CHECKPOINT_MANAGER_SNAPSHOT_FILENAME,
    HEALTH_CHECK_INTERVAL_S_ENV_VAR,
    PREEMPTION_POLL_INTERVAL_S_ENV_VAR,
)
from ray.train.v2._internal.execution.callback import (  # noqa: E402
    ControllerCallback,
    ReportCallback,
    WorkerCallback,
    WorkerGroupCallback,
)
from ray.train.v2._internal.execution.checkpoint.checkpoint_manager import CheckpointManager  # noqa: E402
from ray.train.v2._internal.execution.context import get_train_context  # noqa: E402
from ray.train.v2._internal.execution.failure_handling import default as failure_policy  # noqa: E402
from ray.train.v2._internal.execution.preemption import PreemptionContext  # noqa: E402
from ray.train.v2._internal.execution.train_fn_utils import (  # noqa: E402
    DistributedTrainFnUtils,
    set_train_fn_utils,
)
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer  # noqa: E402
from ray.train.v2.api.exceptions import ControllerError  # noqa: E402
from ray.train.v2.api.preemption import PreemptionInfo  # noqa: E402
from ray.train.v2.api.report_config import CheckpointConsistencyMode  # noqa: E402

__all__ = [
    "CHECKPOINT_MANAGER_SNAPSHOT_FILENAME",
    "CheckpointManager",
    "ControllerCallback",
    "ControllerError",
    "DataParallelTrainer",
    "ReportCallback",
    "WorkerCallback",
    "WorkerGroupCallback",
]

POLL_INTERVALS_S = {HEALTH_CHECK_INTERVAL_S_ENV_VAR: "0.1", PREEMPTION_POLL_INTERVAL_S_ENV_VAR: "1"}
"""Our defaults for Ray's own variables. The controller commits a checkpoint when it polls its workers; at Ray's default
of 2 s, that takes about 3 s. A drained node is noticed after 5 s by default."""

_FAR_MS = 10 * 365 * 86_400_000
"""Ten years: a deadline that never comes. Without any, Ray assumes 120 s."""


# The controller


def log_briefly(kind: type[Exception]) -> None:
    """Let the controller log an error of this kind in one line. Ray logs each with its traceback."""

    def shorten(record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, kind):
            record.msg, record.args, record.exc_info = str(error), (), None
        return True

    logging.getLogger(failure_policy.__name__).addFilter(shorten)


def cause_of(error: BaseException) -> BaseException:
    """Return the error of the user's code or of a hook behind an error of Ray's controller."""
    failures = getattr(error, "worker_failures", None)
    cause: BaseException = next(iter(failures.values())) if failures else getattr(error, "controller_failure", error)
    return cause


class RunStorage:
    """Where Ray keeps a run and its snapshot, the list of its checkpoints."""

    def __init__(self, storage_context: Any) -> None:
        self.files: Any = storage_context.storage_filesystem
        self.snapshot: str = storage_context.checkpoint_manager_snapshot_path
        self._path_of = storage_context.build_checkpoint_path_from_name

    @classmethod
    def of_run(cls, train_run_context: Any) -> RunStorage:
        return cls(train_run_context.run_config.storage_context)

    def has_checkpoint(self, name: str) -> bool:
        return bool(self.files.get_file_info(self._path_of(name)).type.name != "NotFound")


def checkpoints_in(snapshot: Mapping[str, Any]) -> list[str]:
    """Return the names of the checkpoints in a snapshot."""
    return [result["checkpoint_dir_name"] for result in snapshot.get("checkpoint_results", ())]


def latest_metrics_in(snapshot: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the metrics of the checkpoint that Ray resumes from; nothing: there is none."""
    latest = snapshot.get("latest_checkpoint_result")
    metrics: Mapping[str, Any] = latest["metrics"] if latest else {}
    return metrics


_GUARDED = "_reprieve_guarded"


def replace_snapshot_io(write: Callable[[RunStorage, bytes], None], before_load: Callable[[RunStorage], None]) -> None:
    """Replace how this process writes snapshots, and call `before_load` before it loads one."""
    if getattr(CheckpointManager, _GUARDED, False):
        return
    setattr(CheckpointManager, _GUARDED, True)
    original = CheckpointManager._maybe_load_state_from_storage

    def write_state(manager: Any) -> None:
        write(RunStorage(manager._storage_context), manager._save_state().encode())

    @functools.wraps(original)
    def load(manager: Any) -> None:
        before_load(RunStorage(manager._storage_context))
        original(manager)

    CheckpointManager._write_state_to_storage = write_state  # type: ignore[method-assign]
    CheckpointManager._maybe_load_state_from_storage = load  # type: ignore[method-assign]


def run_on(worker: Any, function: Callable[[], Any]) -> Any:
    """Start a function in a worker. Returns a reference to its result. In the controller."""
    return worker.execute_async(function)


def address_of(worker: Any) -> str:
    """Return the address of a worker's node. In the controller."""
    return str(worker.metadata.node_ip)


# The driver


def put_key(key: str, value: bytes) -> None:
    """Set a key of the cluster, which driver and controller see before there is a store."""
    _internal_kv_put(key.encode(), value, overwrite=True, namespace=b"reprieve")


def get_key(key: str) -> bytes | None:
    value: bytes | None = _internal_kv_get(key.encode(), namespace=b"reprieve")
    return value


# A worker


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerContext:
    """What a worker knows about its run."""

    rank: int
    world_size: int
    local_rank: int
    run_name: str
    run_id: str
    """Of this `fit()`: the next driver has another one."""
    folder: Path | None
    """Ray's folder of the run; None: it is not in a file system."""
    uri: str = ""
    """Of that folder, wherever it is."""


def worker_context() -> WorkerContext:
    context = get_train_context()
    distributed = context.distributed_context
    return WorkerContext(
        rank=distributed.world_rank,
        world_size=distributed.world_size,
        local_rank=distributed.local_rank,
        run_name=context.train_run_context.run_config.name or "ray",
        run_id=context.train_run_context.run_id,
        folder=_local_folder(context.storage_context),
        uri=f"{context.storage_context.storage_filesystem.type_name}://{context.storage_context.experiment_fs_path}",
    )


def run_folder(train_run_context: Any) -> Path | None:
    """Return Ray's folder of the run, in the controller; None: it is not in a file system."""
    return _local_folder(train_run_context.run_config.storage_context)


def _local_folder(storage: Any) -> Path | None:
    is_local = getattr(storage.storage_filesystem, "type_name", "") == "local"
    return Path(storage.experiment_fs_path) if is_local else None


class HeldPreemption(PreemptionContext):
    """What a worker tells the controller about a preemption: a `PreemptionContext` that we control.

    While held, the controller waits: it counts no failure of its own making, resizes nothing and restarts nothing.
    Released, it restarts the group of workers at its next poll.
    """

    def __init__(self, on_drain: Callable[[float | None], None]) -> None:
        """`on_drain`: called on the worker's main thread when Ray drains a node of the run, with the deadline in
        seconds since the epoch, if there is one."""
        failures = get_train_context().train_run_context.run_config.failure_config
        self._extra_grace_s = getattr(failures, "preemption_grace_s", 0.0) or 0.0
        self._names_ranks = not getattr(failures, "relax_collectives_on_preemption", False)
        self._on_drain = on_drain
        self._info: PreemptionInfo | None = None
        self._released: PreemptionInfo | None = None

    @property
    def preemption_info(self) -> PreemptionInfo | None:
        return self._released or self._info

    @preemption_info.setter
    def preemption_info(self, info: PreemptionInfo | None) -> None:
        """Ray sets this when it drains a node."""
        if info is None:
            return
        # With relaxed collectives, Ray commits without the ranks that are named here: that checkpoint is not whole.
        self._info = replace(
            info,
            preempted_node_to_ranks=info.preempted_node_to_ranks if self._names_ranks else {},
            deadline_ms=info.deadline_ms or _now_ms() + _FAR_MS,
        )
        self._on_drain(info.deadline_ms / 1000 if info.deadline_ms else None)

    def hold(self) -> None:
        """Tell the controller that a stop is in progress, without a deadline."""
        if self._info is None:
            self._info = PreemptionInfo(deadline_ms=_now_ms() + _FAR_MS, preempted_node_to_ranks={})

    def release(self) -> None:
        """Tell the controller to restart the group now."""
        past_ms = _now_ms() - round(1000 * (self._extra_grace_s + 1))
        self._released = PreemptionInfo(deadline_ms=past_ms, preempted_node_to_ranks={})

    @classmethod
    def install(cls, on_drain: Callable[[float | None], None]) -> HeldPreemption:
        """Replace the context of this worker."""
        context = get_train_context()
        held = cls(on_drain)
        if (info := context.preemption_context.preemption_info) is not None:
            held.preemption_info = info
        context.preemption_context = held
        return held


def _now_ms() -> int:
    return round(time.time() * 1000)


Report = Callable[..., None]


def replace_report(wrapper: Callable[[Report], Report]) -> None:
    """Replace `ray.train.report` in this worker. `wrapper`: takes the original and returns the replacement."""
    utils = DistributedTrainFnUtils()
    utils.report = wrapper(utils.report)  # type: ignore[method-assign]
    set_train_fn_utils(utils)


def wrap_train_function(wrapper: Callable[[Callable[[], Any]], Callable[[], Any]]) -> None:
    """Wrap the function that this worker is about to run."""
    runner = get_train_context().execution_context.training_thread_runner
    run = runner.run
    runner.run = lambda target: run(wrapper(target))  # type: ignore[method-assign]


class Commit:
    """The controller's answer whether it has processed all reports of this worker."""

    def __init__(self) -> None:
        self._answer: Any = None

    def wait(self, timeout_s: float) -> str | None:
        """Wait until the last reported checkpoint is committed. Returns its path; None: it is not, so far."""
        context = get_train_context()
        if self._answer is None:
            # Without a limit of Ray's: when that is over, it answers as if all were processed.
            self._answer = context.controller_actor.get_all_reported_checkpoints.remote(
                context.report_call_index, CheckpointConsistencyMode.COMMITTED, None
            )
        if not ray.wait([self._answer], timeout=timeout_s)[0]:
            return None
        ray.get(self._answer)  # raises if the controller is gone
        # Only now: while an upload runs in the background, this is still the checkpoint before it.
        return None if context.checkpoint is None else str(context.checkpoint.path)
