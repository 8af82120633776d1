"""Ray's list of checkpoints survives a controller that is killed while it writes it. With Ray's own classes."""

from __future__ import annotations

import json
import logging
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ray.train import Checkpoint
from ray.train.v2._internal.exceptions import CheckpointManagerInitializationError
from ray.train.v2._internal.execution.checkpoint.checkpoint_manager import CheckpointManager
from ray.train.v2._internal.execution.storage import StorageContext
from ray.train.v2._internal.execution.training_report import _TrainingReport
from ray.train.v2.api.config import CheckpointConfig

from reprieve.adapters.ray import snapshot

NAME = "checkpoint_manager_snapshot.json"

# Ray's own use of pydantic.
pytestmark = pytest.mark.filterwarnings("ignore:The `.*` method is deprecated:DeprecationWarning")


@pytest.fixture(autouse=True)
def _guarded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Guard Ray's class for the test, and give it back as it was."""
    for name in ("_write_state_to_storage", "_maybe_load_state_from_storage"):
        monkeypatch.setattr(CheckpointManager, name, getattr(CheckpointManager, name))
    monkeypatch.setattr(CheckpointManager, "_reprieve_guarded", False, raising=False)
    snapshot.guard_snapshots()
    yield


@pytest.fixture
def storage(tmp_path: Path) -> StorageContext:
    return StorageContext(storage_path=str(tmp_path), experiment_dir_name="run")


def manager(storage: StorageContext) -> CheckpointManager:
    """As a controller makes it at its start: it loads the snapshot, if there is one."""
    made = CheckpointManager(checkpoint_config=CheckpointConfig(), storage_context=storage)
    made._notify = lambda: None  # needs the controller's event loop
    return made


def report(to: CheckpointManager, storage: StorageContext, name: str) -> None:
    path = Path(storage.experiment_fs_path, name)
    path.mkdir()
    to.register_checkpoint(_TrainingReport(Checkpoint(str(path)), {"loss": 1.0}, validation=False))


@pytest.fixture
def snapshot_file(storage: StorageContext) -> Path:
    """The snapshot of a run with two checkpoints."""
    controller = manager(storage)
    report(controller, storage, "checkpoint_1")
    report(controller, storage, "checkpoint_2")
    return Path(storage.checkpoint_manager_snapshot_path)


def latest(storage: StorageContext) -> str | None:
    result = manager(storage).latest_checkpoint_result
    return None if result is None else Path(result.checkpoint.path).name


def test_a_good_snapshot_is_left_alone(
    snapshot_file: Path, storage: StorageContext, caplog: pytest.LogCaptureFixture
) -> None:
    before = snapshot_file.read_bytes(), snapshot_file.stat().st_mtime_ns
    assert latest(storage) == "checkpoint_2"
    assert (snapshot_file.read_bytes(), snapshot_file.stat().st_mtime_ns) == before
    assert [record for record in caplog.records if record.name == "reprieve"] == []


def test_writing_replaces_the_file_and_keeps_a_copy(snapshot_file: Path, storage: StorageContext) -> None:
    before = snapshot_file.stat().st_ino
    report(manager(storage), storage, "checkpoint_3")
    assert snapshot_file.stat().st_ino != before
    assert snapshot_file.with_name(f"{NAME}.copy").read_bytes() == snapshot_file.read_bytes()
    assert {path.name for path in snapshot_file.parent.iterdir() if NAME in path.name} == {NAME, f"{NAME}.copy"}


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-20]), "is torn"),
        (lambda path: path.write_bytes(b""), "is empty"),
        (lambda path: path.write_bytes(b"{}"), "is empty"),
        (lambda path: path.unlink(), "is missing"),
    ],
    ids=["torn", "empty", "no content", "missing"],
)
def test_a_bad_snapshot_is_replaced_by_its_copy(
    damage: Any, problem: str, snapshot_file: Path, storage: StorageContext, caplog: pytest.LogCaptureFixture
) -> None:
    damage(snapshot_file)
    assert latest(storage) == "checkpoint_2"
    assert f"{snapshot_file} {problem}: replaced by its copy" in caplog.text
    json.loads(snapshot_file.read_bytes())


def test_a_torn_snapshot_without_a_copy_is_an_error_of_ray(
    snapshot_file: Path, storage: StorageContext, caplog: pytest.LogCaptureFixture
) -> None:
    snapshot_file.with_name(f"{NAME}.copy").unlink()
    snapshot_file.write_bytes(snapshot_file.read_bytes()[:-20])
    with pytest.raises(CheckpointManagerInitializationError):
        manager(storage)
    assert "is torn, and its copy is missing: Ray refuses to use this folder" in caplog.text


def test_a_copy_that_is_torn_too_is_not_used(
    snapshot_file: Path, storage: StorageContext, caplog: pytest.LogCaptureFixture
) -> None:
    for path in (snapshot_file, snapshot_file.with_name(f"{NAME}.copy")):
        path.write_bytes(b'{"checkpoint')
    with pytest.raises(CheckpointManagerInitializationError):
        manager(storage)
    assert "is torn, and its copy is torn" in caplog.text


def test_a_run_whose_checkpoints_were_all_removed_starts_over(
    snapshot_file: Path, storage: StorageContext, caplog: pytest.LogCaptureFixture
) -> None:
    """As it does without the copy, which would make Ray refuse the folder."""
    snapshot_file.unlink()
    for name in ("checkpoint_1", "checkpoint_2"):
        Path(storage.experiment_fs_path, name).rmdir()
    assert latest(storage) is None
    assert "its copy names checkpoint_1, which is gone: Ray starts this run over" in caplog.text


def test_a_new_run_says_nothing(storage: StorageContext, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="reprieve"):
        assert latest(storage) is None
    assert [record for record in caplog.records if record.name == "reprieve"] == []


# Killed while it writes

_WRITER = """
import os, sys
from pathlib import Path
from ray.train import Checkpoint
from ray.train.v2._internal.execution.checkpoint.checkpoint_manager import CheckpointManager
from ray.train.v2._internal.execution.storage import StorageContext
from ray.train.v2._internal.execution.training_report import _TrainingReport
from ray.train.v2.api.config import CheckpointConfig
from reprieve.adapters.ray import snapshot

if sys.argv[2] == "guarded":
    snapshot.guard_snapshots()

for _ in sys.stdin:  # one writer for each line, in a process of its own, which imports nothing any more
    pid = os.fork()
    if pid == 0:
        sys.excepthook = lambda *error: (sys.__excepthook__(*error), os._exit(1))
        storage = StorageContext(storage_path=sys.argv[1], experiment_dir_name="run")
        manager = CheckpointManager(checkpoint_config=CheckpointConfig(), storage_context=storage)
        manager._notify = manager._write_state_to_storage = lambda: None
        for number in range(20):  # so that the file has more than one page
            path = Path(storage.experiment_fs_path, f"checkpoint_{number}")
            path.mkdir(exist_ok=True)
            metrics = {"text": "x" * 5000}
            manager.register_checkpoint(_TrainingReport(Checkpoint(str(path)), metrics, validation=False))
        del manager._write_state_to_storage
        manager._write_state_to_storage()
        print(os.getpid(), flush=True)
        while True:
            manager._write_state_to_storage()
    os.waitpid(pid, 0)
    print("killed", flush=True)
"""


class Writers:
    """Controllers that do nothing but write the snapshot, each in a folder of its own, until they are killed."""

    def __init__(self, folder: Path, mode: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(_WRITER), str(folder), mode],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def kill_one(self, after_s: float) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write("next\n")
        self._process.stdin.flush()
        pid = int(self._process.stdout.readline())
        time.sleep(after_s)
        os.kill(pid, signal.SIGKILL)
        assert self._process.stdout.readline() == "killed\n"

    def __enter__(self) -> Writers:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()


def loads(storage: StorageContext) -> bool:
    """Whether Ray itself, without our repair, can load the snapshot."""
    text = Path(storage.checkpoint_manager_snapshot_path).read_text()
    empty = StorageContext(storage_path=storage.storage_fs_path, experiment_dir_name="empty")
    fresh = manager(empty)
    fresh._storage_context = storage
    try:
        fresh._load_state(text)
    except CheckpointManagerInitializationError:
        return False
    return len(fresh._checkpoint_results) >= 20


def test_a_controller_that_is_killed_100_times_leaves_a_good_snapshot(tmp_path: Path) -> None:
    storage = StorageContext(storage_path=str(tmp_path), experiment_dir_name="run")
    path = Path(storage.checkpoint_manager_snapshot_path)
    with Writers(tmp_path, "guarded") as writers:
        for _ in range(100):
            writers.kill_one(random.uniform(0, 0.02))
            assert loads(storage)
            path.unlink()
            path.with_name(f"{NAME}.copy").unlink()


def test_what_ray_writes_itself_can_be_torn(tmp_path: Path) -> None:
    """Otherwise the test above shows nothing."""
    storage = StorageContext(storage_path=str(tmp_path), experiment_dir_name="run")
    path = Path(storage.checkpoint_manager_snapshot_path)
    with Writers(tmp_path, "as Ray does it") as writers:
        for _ in range(100):
            writers.kill_one(random.uniform(0, 0.02))
            if not loads(storage):
                return
            path.unlink()
    pytest.fail("no kill hit a write")
