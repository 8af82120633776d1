"""What the driver refuses, or warns of, before a run starts."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray.train

from reprieve.adapters.ray import internals
from reprieve.adapters.ray.driver import _check
from reprieve.adapters.ray.internals import WorkerContext
from reprieve.adapters.ray.run import Run
from reprieve.errors import ConfigError


def trainer(*, num_workers: int = 2, **options: Any) -> Any:
    return SimpleNamespace(
        scaling_config=ray.train.ScalingConfig(num_workers=num_workers), run_config=ray.train.RunConfig(**options)
    )


def test_a_run_in_the_driver_itself_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"num_workers=0 .* Use ScalingConfig\(num_workers=1\), or reprieve.Run"):
        _check(trainer(num_workers=0, name="run"))


def test_a_run_without_a_name_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    _check(trainer())
    assert "this run has no name: if its driver stops, the next one starts over" in caplog.text


def test_a_run_with_a_name_is_accepted_in_silence(caplog: pytest.LogCaptureFixture) -> None:
    _check(trainer(name="ray_train_run-of-mine"))
    assert caplog.records == []


def in_worker(monkeypatch: pytest.MonkeyPatch, folder: Path | None) -> None:
    context = WorkerContext(rank=0, world_size=1, local_rank=0, run_name="run", folder=folder)
    monkeypatch.setattr(internals, "worker_context", lambda: context)


@pytest.mark.parametrize("uri", ["checkpoints", "./checkpoints", Path("checkpoints")], ids=str)
def test_a_relative_folder_is_refused(uri: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_worker(monkeypatch, tmp_path)
    with pytest.raises(ConfigError, match="is relative, and Ray changes the working directory: write an absolute path"):
        Run(uri)


def test_storage_that_is_no_file_system_needs_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    in_worker(monkeypatch, None)
    with pytest.raises(ConfigError, match="the storage_path of this run is not in a file system"):
        Run()
