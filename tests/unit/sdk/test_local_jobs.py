"""The LocalProcess backend, without a process: what it installs, and how its jobs are waited for."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kubeflow.trainer import LocalProcessBackendConfig
from kubeflow.trainer.backends.localprocess.backend import LocalProcessBackend
from kubeflow.trainer.backends.localprocess.utils import get_install_packages

from reprieve.host import boot_id
from reprieve.kubeflow import TrainerClient, TransformersTrainer
from reprieve.kubernetes.jobs.state import JobState
from reprieve.kubernetes.jobs.stop import WaitTimeout
from reprieve.launch.process import start_time
from reprieve.launch.runs.run_record import RunRecord, Runs
from reprieve.run_state import RunState
from reprieve.sdk.local_jobs import JOB, JobStopped, LocalJobs

ALIVE: dict[str, Any] = {"pid": os.getpid(), "boot": boot_id(), "pid_started": start_time(os.getpid())}


def write_record(**changes: Any) -> None:
    """The record of the job k1, whose launcher has ended."""
    record = RunRecord("train-1", ["python"], "/", {}, {JOB: "k1"}, step=7, checkpoint_step=7)
    for name, value in changes.items():
        setattr(record, name, value)
    with Runs().hold("train-1") as folder:
        (folder.path / "run.json").write_bytes(record.to_json())


@pytest.fixture(autouse=True)
def _state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REPRIEVE_STATE_DIR", str(tmp_path))


@pytest.mark.parametrize(
    ("step", "message"),
    [(7, "k1 was stopped at step 7, and saved at step 7: resume"), (None, "at step 7, and has no checkpoint: resume")],
)
def test_a_job_that_was_stopped_is_not_waited_for(step: int | None, message: str) -> None:
    write_record(state=RunState.PREEMPTED, checkpoint_step=step)
    client = TrainerClient(LocalProcessBackendConfig())
    with pytest.raises(JobStopped, match=message):
        client.wait("k1", timeout=2)
    views = client.progress("k1", follow=True)
    assert next(views).state == JobState.PREEMPTED
    with pytest.raises(JobStopped):
        next(views)


@pytest.mark.parametrize(
    "changes",
    [{"state": RunState.PAUSED}, {"state": RunState.PREEMPTED, **ALIVE}, {"state": RunState.RUNNING, **ALIVE}],
    ids=["paused", "its launcher is about to end", "running"],
)
def test_a_job_that_may_still_end_is_waited_for(changes: dict[str, Any]) -> None:
    write_record(**changes)
    jobs = LocalJobs(SimpleNamespace())
    with pytest.raises(WaitTimeout, match="k1 is still"):
        jobs.wait("k1", lambda view: view.state.is_end, timeout=timedelta(milliseconds=1), interval_s=0.001)


def train_func() -> None: ...


@pytest.mark.parametrize(
    ("packages", "installed"),
    [
        (None, ["reprieve==9"]),
        (["peft", "reprieve-tools"], ["reprieve==9", "peft", "reprieve-tools"]),
        (["peft", "reprieve[finetune]"], ["peft", "reprieve[finetune]"]),
        (["Reprieve @ https://a.example/r.whl"], ["Reprieve @ https://a.example/r.whl"]),
    ],
    ids=str,
)
def test_reprieve_is_installed_once(
    packages: list[str] | None, installed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The SDK refuses a package that is named twice."""
    jobs: list[dict[str, Any]] = []
    monkeypatch.setattr(LocalProcessBackend, "train", lambda self, **options: jobs.append(options) or "job")
    trainer = TransformersTrainer(func=train_func, packages_to_install=packages, reprieve="reprieve==9")
    TrainerClient(LocalProcessBackendConfig()).train(runtime="torch-distributed", trainer=trainer)
    found = jobs[0]["trainer"].packages_to_install
    assert found == installed
    assert get_install_packages([], found) == installed
