"""All that is private in Ray: its callbacks, a worker's context, the controller's snapshot. Nothing else imports it.

Ray may change these names in any release. So a version that was not tested is refused, with a way to try it.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray
import ray.train
from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_put

from reprieve.errors import ConfigError

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

POLL_INTERVALS_S = {HEALTH_CHECK_INTERVAL_S_ENV_VAR: "0.2", PREEMPTION_POLL_INTERVAL_S_ENV_VAR: "1"}
"""Our defaults for Ray's own variables. The controller commits a checkpoint when it polls its workers; at Ray's default
of 2 s, that takes about 3 s. A drained node is noticed after 5 s by default."""

_FAR_MS = 10 * 365 * 86_400_000
"""Ten years: a deadline that never comes. Without any, Ray assumes 120 s."""


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
    folder: Path | None
    """Ray's folder of the run; None: it is not in a file system."""


def worker_context() -> WorkerContext:
    context = get_train_context()
    distributed = context.distributed_context
    return WorkerContext(
        rank=distributed.world_rank,
        world_size=distributed.world_size,
        local_rank=distributed.local_rank,
        run_name=context.train_run_context.run_config.name or "ray",
        folder=_local_folder(context.storage_context),
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


def reported_checkpoint() -> str | None:
    """Return the path of the last checkpoint that this worker reported."""
    checkpoint = get_train_context().checkpoint
    return None if checkpoint is None else str(checkpoint.path)


def is_committed(path: str, timeout_s: float) -> bool:
    """Wait until the controller has processed all reports of this worker. Returns whether it has this checkpoint."""
    reported = get_train_context().get_all_reported_checkpoints(CheckpointConsistencyMode.COMMITTED, timeout_s)
    return any(each.checkpoint.path == path for each in reported)
