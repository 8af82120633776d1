"""The verbs of the client for jobs of the LocalProcess backend, with a run of the launcher as the backend starts it."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from reprieve.errors import ConfigError
from reprieve.kubernetes.jobs.state import JobState
from reprieve.sdk.local_jobs import JOB, LocalJobs
from tests.support.launch_kit import Lab, until

LIMIT = timedelta(seconds=60)


def backend_that_knows(**jobs: str) -> Any:
    """A backend of the SDK: `get_job` raises ValueError for what it does not know."""

    def get_job(name: str) -> Any:
        if name not in jobs:
            raise ValueError(f"No TrainJob with name {name}")
        return SimpleNamespace(status=jobs[name])

    return SimpleNamespace(get_job=get_job)


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lab:
    lab = Lab(tmp_path)
    for name in ("REPRIEVE_STATE_DIR", "REPRIEVE_TERMINATION_LOG"):
        monkeypatch.setenv(name, lab.env[name])
    return lab


def test_a_job_is_paused_and_resumed(lab: Lab) -> None:
    lab.env[JOB] = "k1234"
    launched = lab.start(lab.python(steps=60, step_s=0.5))
    until(lambda: lab.steps() >= 3, launched)
    jobs = LocalJobs(backend_that_knows())
    assert jobs.get("k1234").state == JobState.RUNNING
    with pytest.raises(ConfigError, match="k1234 is running already"):
        jobs.resume("k1234")
    outcome = jobs.pause("k1234", timeout=LIMIT)
    assert launched.wait().code == 143
    assert outcome.is_saved and not outcome.was_paused and outcome.step == lab.steps()
    assert jobs.pause("k1234").was_paused
    assert jobs.get("k1234").state == JobState.PAUSED
    (lab.job / "hurry").touch()
    assert jobs.resume("k1234").state != JobState.FAILED
    view = jobs.wait("k1234", lambda view: view.state.is_end, timeout=LIMIT)
    assert (view.state, view.progress.step, lab.steps()) == (JobState.SUCCEEDED, 60, 60)
    assert jobs.checkpoints("k1234")[0].step == 60
    with pytest.raises(ConfigError, match="k1234 is not running: finished"):
        jobs.pause("k1234")


@pytest.mark.parametrize(
    ("status", "state", "reason"),
    [("Running", JobState.PENDING, "packages are installed"), ("Failed", JobState.FAILED, "see get_job_logs")],
)
def test_a_job_without_a_record_yet_is_one_of_the_backend(lab: Lab, status: str, state: JobState, reason: str) -> None:
    view = LocalJobs(backend_that_knows(k1=status)).get("k1")
    assert view.state == state and reason in view.reason


def test_a_job_that_nobody_knows_is_refused(lab: Lab) -> None:
    with pytest.raises(ConfigError, match="nobody"):
        LocalJobs(backend_that_knows()).get("nobody")
