"""The callback on its way from the driver to controller and workers, and its hooks in the controller."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray.util
from pyarrow.fs import _MockFileSystem
from ray.train import Checkpoint, CheckpointConfig
from ray.train.v2._internal.execution.checkpoint.checkpoint_manager import CheckpointManager
from ray.train.v2._internal.execution.storage import StorageContext
from ray.train.v2._internal.execution.training_report import _TrainingReport

from reprieve.adapters.ray import callback as callback_module
from reprieve.adapters.ray import controller, internals
from reprieve.adapters.ray.callback import JITCheckpointCallback
from reprieve.adapters.ray.config import JITCheckpointConfig
from reprieve.adapters.ray.controller import DriverStopped, RunController
from reprieve.adapters.ray.messages import DriverStop, StoreAddress, stop_key, store_key
from reprieve.errors import ConfigError, FolderInUse
from reprieve.run_state import RunState
from tests.support.helpers import FakeClock


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, bytes]]:
    """The keys of a cluster, in which this process is the controller."""
    keys: dict[str, bytes] = {}
    monkeypatch.setattr(internals, "put_key", keys.__setitem__)
    monkeypatch.setattr(internals, "get_key", keys.get)
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    monkeypatch.setattr(RunController, "_running", None)
    monkeypatch.setattr(controller, "show_logs", lambda rank: None)
    monkeypatch.setattr(callback_module, "check_nodes", lambda workers: None)
    for name in ("_write_state_to_storage", "_maybe_load_state_from_storage"):
        monkeypatch.setattr(CheckpointManager, name, getattr(CheckpointManager, name))
    monkeypatch.setattr(CheckpointManager, "_reprieve_guarded", False, raising=False)
    yield keys


@pytest.fixture
def run_context(tmp_path: Path) -> Any:
    storage = StorageContext(storage_path=str(tmp_path), experiment_dir_name="run")
    return SimpleNamespace(run_config=SimpleNamespace(storage_context=storage, name="run"))


def made() -> JITCheckpointCallback:
    return JITCheckpointCallback(JITCheckpointConfig(enabled=True, kill_wait=1.5, grace=60))


def sent(callback: JITCheckpointCallback) -> JITCheckpointCallback:
    copy: JITCheckpointCallback = pickle.loads(pickle.dumps(callback))
    return copy


def start_group(callback: JITCheckpointCallback, workers: int = 2) -> None:
    callback.before_worker_group_start(SimpleNamespace(num_workers=workers))


def test_the_settings_travel(cluster: dict[str, bytes]) -> None:
    callback = made()
    copy = sent(sent(callback))
    assert (copy.run_id, copy.config) == (callback.run_id, callback.config)
    assert copy.config.kill_wait_s == 1.5


def test_each_callback_is_another_run() -> None:
    assert made().run_id != made().run_id


def test_snapshots_are_guarded_where_the_callback_arrives(cluster: dict[str, bytes]) -> None:
    sent(made())
    assert CheckpointManager._reprieve_guarded


def test_address_and_generation_reach_the_workers_and_the_live_part_stays(
    cluster: dict[str, bytes], run_context: Any
) -> None:
    live = sent(made())
    live.after_controller_start(run_context)
    start_group(live)
    start_group(live)
    in_worker = sent(sent(live))
    assert in_worker._controller is None and live._controller is not None
    assert in_worker._generation == 2
    assert in_worker._address == StoreAddress.from_json(cluster[store_key(live.run_id)])
    asyncio.run(live.before_controller_shutdown())


def test_a_copy_that_gets_no_hooks_protects_nothing(cluster: dict[str, bytes]) -> None:
    """Ray pickles the callback once more inside the run's config."""
    copy = sent(made())
    start_group(copy)
    assert copy.before_init_train_context([]) == {}
    copy.after_worker_group_start(None)
    copy.after_worker_group_poll_status(None)
    copy.after_init_train_context()
    copy.before_worker_shutdown()
    copy.before_controller_abort()
    assert copy._generation == 0


def test_two_callbacks_protect_once(cluster: dict[str, bytes], run_context: Any) -> None:
    first, second = sent(made()), sent(made())
    first.after_controller_start(run_context)
    second.after_controller_start(run_context)
    start_group(first)
    start_group(second)
    assert first._address is not None and first._generation == 1
    assert second._address is None and second._generation == 0
    assert list(cluster) == [store_key(first.run_id)]
    first.before_controller_abort()


def test_a_callback_beside_one_that_protects_leaves_the_run_to_it(cluster: dict[str, bytes], run_context: Any) -> None:
    """Ray calls those of the environment first."""
    of_environment, of_config = sent(made()), sent(made())
    of_environment._protects = False
    sent(of_environment).after_controller_start(run_context)
    of_config.after_controller_start(run_context)
    assert list(cluster) == [store_key(of_config.run_id)]
    of_config.before_controller_abort()


def test_another_live_run_of_that_name_is_refused_until_it_ends(
    cluster: dict[str, bytes], run_context: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("reprieve.adapters.ray.run_folder.SystemClock", FakeClock)
    first, second, third = (sent(made()) for _ in range(3))
    first.after_controller_start(run_context)
    RunController._running = None  # in another controller
    with pytest.raises(FolderInUse, match="in use by another live run of this name"):
        second.after_controller_start(run_context)
    assert second._address is None
    asyncio.run(second.before_controller_shutdown())  # Ray calls it after the refusal, too
    asyncio.run(first.before_controller_shutdown())
    RunController._running = None
    third.after_controller_start(run_context)
    third.before_controller_abort()


@pytest.mark.filterwarnings("ignore:The `.*` method is deprecated:DeprecationWarning")  # of pydantic, used by Ray
def test_a_new_driver_knows_the_step_that_it_resumes_from(cluster: dict[str, bytes], run_context: Any) -> None:
    manager = CheckpointManager(CheckpointConfig(), storage := run_context.run_config.storage_context)
    path = Path(storage.build_checkpoint_path_from_name("checkpoint_1"))
    path.mkdir(parents=True)
    report = _TrainingReport(metrics={"epoch": 30.5}, checkpoint=Checkpoint(str(path)), validation=False)
    manager._notify = lambda: None  # needs the controller's event loop
    manager.register_checkpoint(report)
    live = sent(made())
    live.after_controller_start(run_context)
    start_group(live)
    assert live._controller is not None and live._controller.progress.snapshot().resumed_from == 30
    live.after_controller_finish(SimpleNamespace(error=OSError("the disk is full")))
    assert live._controller.progress.snapshot().state == RunState.FAILED
    asyncio.run(live.before_controller_shutdown())


def test_storage_that_is_no_file_system_is_not_claimed(cluster: dict[str, bytes], tmp_path: Path) -> None:
    files = _MockFileSystem()
    files.create_dir("bucket/run")
    storage = StorageContext("bucket", "run", storage_filesystem=files)
    live = sent(made())
    live.after_controller_start(SimpleNamespace(run_config=SimpleNamespace(storage_context=storage)))
    assert live._address is not None and live._controller is not None
    assert live._controller._lease is None
    asyncio.run(live.before_controller_shutdown())


def test_nodes_are_checked_before_the_workers_get_the_callback(
    cluster: dict[str, bytes], run_context: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(workers: list[str]) -> None:
        raise ConfigError(f"checked {workers}")

    monkeypatch.setattr(callback_module, "check_nodes", refuse)
    live = sent(made())
    live.after_controller_start(run_context)
    with pytest.raises(ConfigError, match=r"checked \['a worker'\]"):
        live.before_init_train_context(["a worker"])
    live.before_controller_abort()


def test_a_stop_before_there_are_workers_ends_the_run(cluster: dict[str, bytes], run_context: Any) -> None:
    live = sent(made())
    cluster[stop_key(live.run_id)] = DriverStop(reason="SIGTERM", deadline=None).to_json()
    live.after_controller_start(run_context)
    with pytest.raises(DriverStopped) as stopped:
        start_group(live)
    assert stopped.value.code == 143 and stopped.value.reason == "SIGTERM"
    again = pickle.loads(pickle.dumps(stopped.value))  # on its way to the driver
    assert (type(again), again.code, again.reason) == (DriverStopped, 143, "SIGTERM")
    asyncio.run(live.before_controller_shutdown())
