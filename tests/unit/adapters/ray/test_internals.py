"""What Reprieve needs from Ray's private parts: versions that it refuses, and what it tells the controller."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from queue import Queue
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.train import Checkpoint, CheckpointUploadMode
from ray.train.v2._internal.execution.context import TrainContext
from ray.train.v2._internal.execution.controller.controller import TrainController
from ray.train.v2._internal.execution.preemption import PreemptionContext, merge_preemption_info
from ray.train.v2._internal.execution.storage import StorageContext
from ray.train.v2.api.config import FailureConfig
from ray.train.v2.api.preemption import PreemptionInfo

from reprieve.adapters.ray import internals
from reprieve.adapters.ray.internals import Commit, HeldPreemption, check_version
from reprieve.errors import ConfigError

# Versions


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("REPRIEVE_UNTESTED_RAY", raising=False)
    monkeypatch.delenv("RAY_TRAIN_V2_ENABLED", raising=False)


@pytest.mark.parametrize("version", ["2.58.0", "2.59.1", "2.60.0", "2.60.0.dev0"])
def test_tested_versions_are_accepted(version: str) -> None:
    check_version(version)


@pytest.mark.parametrize("version", ["2.57.9", "2.9.3", "1.99", "unknown"])
def test_an_old_version_is_refused_also_on_request(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REPRIEVE_UNTESTED_RAY", "1")
    with pytest.raises(ConfigError, match=rf"Ray {version} is too old .* Use 2\.58 to 2\.60: pip install"):
        check_version(version)


@pytest.mark.parametrize("version", ["2.61.0", "2.100.0", "3.0.0"])
def test_a_new_version_is_refused_and_can_be_tried(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=rf"Ray {version} is newer than 2\.60.*REPRIEVE_UNTESTED_RAY=1 to try"):
        check_version(version)
    monkeypatch.setenv("REPRIEVE_UNTESTED_RAY", "1")
    check_version(version)


@pytest.mark.parametrize("value", ["0", "false", "False"])
def test_train_v1_is_refused(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_TRAIN_V2_ENABLED", value)
    with pytest.raises(ConfigError, match="needs Ray Train V2: remove RAY_TRAIN_V2_ENABLED=0"):
        check_version("2.60.0")


# What a worker tells the controller


class Drain:
    """A worker's context as Ray makes it, and the drains that the worker heard of."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **options: object) -> None:
        failures = FailureConfig(**options)
        self.extra_grace_s = failures.preemption_grace_s
        run_context = SimpleNamespace(run_config=SimpleNamespace(failure_config=failures))
        self.context = SimpleNamespace(train_run_context=run_context, preemption_context=PreemptionContext())
        self.deadlines: list[float | None] = []
        monkeypatch.setattr(internals, "get_train_context", lambda: self.context)

    def install(self) -> HeldPreemption:
        return HeldPreemption.install(self.deadlines.append)

    def begin(self, deadline_ms: int | None, ranks: dict[str, list[int]] | None = None) -> None:
        """As Ray's `RayTrainWorker.mark_preempt` does."""
        info = PreemptionInfo(deadline_ms=deadline_ms, preempted_node_to_ranks=ranks or {"node": [1]})
        self.context.preemption_context.preemption_info = info

    def restarts(self, *, detected_s_ago: float = 0.0) -> bool:
        """Whether Ray's controller restarts the group, as it decides itself."""
        return TrainController._is_preemption_deadline_exceeded(
            self.context.preemption_context.preemption_info, time.time() - detected_s_ago, self.extra_grace_s
        )


def test_nothing_is_told_before_there_is_a_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    drain = Drain(monkeypatch)
    drain.install()
    assert drain.context.preemption_context.preemption_info is None


def test_a_hold_has_no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    drain = Drain(monkeypatch)
    drain.install().hold()
    assert not drain.restarts(detected_s_ago=121)
    assert not drain.restarts(detected_s_ago=30 * 86400)
    # What Ray does where there is no deadline at all.
    none = PreemptionInfo(deadline_ms=None, preempted_node_to_ranks={})
    assert TrainController._is_preemption_deadline_exceeded(none, time.time() - 121, 0.0)


@pytest.mark.parametrize("extra_grace_s", [0.0, 60.0])
def test_a_release_restarts_at_once(extra_grace_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    drain = Drain(monkeypatch, preemption_grace_s=extra_grace_s)
    held = drain.install()
    held.hold()
    info = drain.context.preemption_context.preemption_info
    held.release()
    assert drain.restarts()
    # The controller merges what it hears over time.
    merged = merge_preemption_info(info, drain.context.preemption_context.preemption_info)
    assert TrainController._is_preemption_deadline_exceeded(merged, time.time(), extra_grace_s)


def test_a_drain_passes_its_deadline_on(monkeypatch: pytest.MonkeyPatch) -> None:
    drain = Drain(monkeypatch)
    drain.install()
    soon_ms = round(time.time() * 1000) + 30_000
    drain.begin(soon_ms)
    assert drain.deadlines == [soon_ms / 1000]
    info = drain.context.preemption_context.preemption_info
    assert info.deadline_ms == soon_ms and info.preempted_ranks == [1]
    assert not drain.restarts()


def test_a_drain_without_a_deadline_waits_for_the_save(monkeypatch: pytest.MonkeyPatch) -> None:
    drain = Drain(monkeypatch)
    held = drain.install()
    drain.begin(None)
    assert drain.deadlines == [None]
    assert not drain.restarts(detected_s_ago=3600)
    held.hold()
    assert not drain.restarts(detected_s_ago=3600)
    held.release()
    assert drain.restarts()


def test_a_drain_before_the_protection_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    drain = Drain(monkeypatch)
    drain.begin(None)
    drain.install()
    assert drain.deadlines == [None]
    assert drain.context.preemption_context.preemption_info is not None


def test_relaxed_collectives_do_not_commit_without_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    drain = Drain(monkeypatch, relax_collectives_on_preemption=True)
    held = drain.install()
    for change in (held.hold, lambda: drain.begin(round(time.time() * 1000) + 30_000), lambda: drain.begin(None)):
        change()
        assert drain.context.preemption_context.preemption_info.preempted_ranks == []
    held.release()
    assert drain.context.preemption_context.preemption_info.preempted_ranks == []


def test_a_drain_after_the_release_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    drain = Drain(monkeypatch)
    held = drain.install()
    held.hold()
    held.release()
    drain.begin(round(time.time() * 1000) + 30_000)
    assert drain.restarts()
    drain.begin(None)
    assert drain.restarts()


# A checkpoint that Ray commits


class Reports:
    """The reports of a world of one, made by Ray's own context, and a controller that processes them when told."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.storage = StorageContext(storage_path=str(folder), experiment_dir_name="run")
        self.processed = 0
        results: Queue[Any] = Queue()
        unused: Any = None
        self.context = TrainContext(
            train_run_context=unused,
            distributed_context=SimpleNamespace(world_rank=0, world_size=1),  # type: ignore[arg-type]
            execution_context=SimpleNamespace(result_queue=results, train_context_callbacks=[]),  # type: ignore[arg-type]
            storage_context=self.storage,
            preemption_context=PreemptionContext(),
            controller_actor=SimpleNamespace(  # type: ignore[arg-type]
                get_all_reported_checkpoints=SimpleNamespace(remote=lambda index, mode, timeout_s: index)
            ),
            dataset_shard_provider=unused,
        )
        monkeypatch.setattr(self.context, "_sync_checkpoint_dir_name_across_ranks", lambda name: name)
        monkeypatch.setattr(internals, "get_train_context", lambda: self.context)
        monkeypatch.setattr(
            ray, "wait", lambda answers, timeout: (answers, []) if self.are_processed(answers) else ([], answers)
        )
        monkeypatch.setattr(ray, "get", lambda answer: [])

    def are_processed(self, answers: list[int]) -> bool:
        return answers == [self.processed]

    def report(self, name: str, mode: CheckpointUploadMode, uploaded: threading.Event | None = None) -> str:
        """Report a checkpoint. Returns its path. `uploaded`: its upload ends then."""

        def upload(checkpoint: Checkpoint, name: str) -> Checkpoint:
            assert uploaded is None or uploaded.wait(20)
            return Checkpoint(self.path(name), self.storage.storage_filesystem)

        self.context.report({}, Checkpoint(str(self.folder)), name, mode, checkpoint_upload_fn=upload)
        return self.path(name)

    def path(self, name: str) -> str:
        return f"{self.storage.experiment_fs_path}/{name}"


@pytest.mark.parametrize("name", ["second", "first"], ids=["another name", "the same name again"])
def test_an_upload_in_the_background_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    reports = Reports(tmp_path, monkeypatch)
    uploaded = threading.Event()
    first = reports.report("first", CheckpointUploadMode.SYNC)
    reports.processed = 1
    assert Commit().wait(1) == first
    reports.report(name, CheckpointUploadMode.ASYNC, uploaded)
    commit = Commit()
    assert commit.wait(0.01) is None, "the checkpoint before it was taken for this one"
    uploaded.set()
    end = time.monotonic() + 20
    while reports.context.current_report_index < 2:
        assert time.monotonic() < end
        time.sleep(0.01)
    assert commit.wait(0.01) is None, "the controller has not processed it"
    reports.processed = 2
    assert commit.wait(1) == reports.path(name)
