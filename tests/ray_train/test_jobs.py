"""`ray job stop`, the real one. It needs Ray's dashboard, which `make test-ray-jobs` installs and starts."""

from __future__ import annotations

import itertools
import json
import os
import shlex
import subprocess
import sys
from typing import Any

import pytest

from tests.ray_train.conftest import JOBS
from tests.support.jobs.ray_job import RayOptions
from tests.support.ray_lab import RayLab

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(JOBS not in os.environ, reason="the cluster has no dashboard: run make test-ray-jobs"),
]

PYTHON = [sys.executable, "-m"]
RUN = [*PYTHON, "reprieve", "run", "--name", "job", *PYTHON]


class Job:
    """A job of the cluster, whose driver is a run of the lab."""

    def __init__(
        self, lab: RayLab, name: str, *, command: list[str] = PYTHON, env: dict[str, str] | None = None, **run: Any
    ) -> None:
        self._lab = lab
        driver = [*command, "tests.support.jobs.ray_job", RayOptions(folder=str(lab.folder), **run).to_json()]
        entrypoint = f"exec {shlex.join(driver)} >>{shlex.quote(str(lab.folder / 'output'))} 2>&1"
        settings = json.dumps({"env_vars": {"XDG_STATE_HOME": str(lab.folder / "state"), **(env or {})}})
        tries = itertools.count()

        def submit() -> str:
            # A refused job may have been registered: its id is taken.
            self._id = f"{lab.folder.name}-{name}-{next(tries)}"
            options = ("--no-wait", "--submission-id", self._id, "--runtime-env-json", settings)
            return self._ray("submit", *options, "--", "sh", "-c", entrypoint, may_fail=True)

        lab.until(submit, "the job is accepted")  # the agent is ready some seconds after the cluster

    def stop(self) -> None:
        """Stop it, and wait until Ray says that it has."""
        self._ray("stop", self._id)
        self.wait("was stopped")

    def wait(self, end: str) -> None:
        self._lab.until(lambda: end in self._ray("status", self._id), f"the job {end}")

    def _ray(self, verb: str, *arguments: str, may_fail: bool = False) -> str:
        """Return what `ray job …` prints, or nothing if it failed."""
        command = [*PYTHON, "ray.scripts.scripts", "job", verb, "--address", os.environ[JOBS], *arguments]
        ended = subprocess.run(command, capture_output=True, text=True, env=self._lab.env, timeout=120)
        assert may_fail or ended.returncode == 0, ended.stdout + ended.stderr
        return ended.stdout + ended.stderr if ended.returncode == 0 else ""


def status(lab: RayLab) -> dict[str, Any]:
    """What `reprieve status` reports."""
    command = [*PYTHON, "reprieve", "status", "--json", "job"]
    env = {**lab.env, "XDG_STATE_HOME": str(lab.folder / "state")}
    return dict(json.loads(subprocess.run(command, env=env, capture_output=True, text=True, timeout=120).stdout))


def test_a_job_that_is_stopped_saves_in_rays_3_seconds(lab: RayLab) -> None:
    """Under `reprieve run`, whose status is right before, during and after the stop."""
    job = Job(lab, "first", command=RUN, steps=1000, step_s=0.1, grace=3, every=1000)
    lab.wait_for_step(5)
    lab.until(lambda: status(lab)["state"] == "running", "the run is running")
    job.stop()
    assert "JIT checkpoint completed" in lab.output()
    assert not (lab.folder / "result").exists(), "code after fit() ran"
    assert status(lab)["state"] == "preempted"
    Job(lab, "second", command=RUN, steps=lab.steps()[-1] + 4).wait("succeeded")
    lab.assert_nothing_lost(lab.steps()[-1] + 1, 2)
    assert len(lab.starts()) == 2
    assert status(lab)["state"] == "finished"


def test_a_job_whose_save_takes_longer_than_its_stop_says_so(lab: RayLab) -> None:
    job = Job(lab, "first", steps=1000, step_s=0.1, grace=3, every=4, stop_save_s=30)
    lab.wait_for_step(9)
    job.stop()
    assert "not all workers have saved before the deadline of the driver" in lab.output()
    assert "JIT checkpoint completed" not in lab.output()
    assert not (lab.folder / "result").exists(), "code after fit() ran"
    Job(lab, "second", steps=lab.steps()[-1] + 4).wait("succeeded")
    assert lab.starts()[1] % 4 == 0 and lab.starts()[1] >= 4, "from its last periodic checkpoint"


def test_the_jobs_runtime_env_sets_the_time_to_save(lab: RayLab) -> None:
    """As in the manifest for KubeRay: a save of 10 s does not fit into Ray's 3 s."""
    env = {"RAY_JOB_STOP_WAIT_TIME_S": "60", "REPRIEVE_GRACE": "55"}
    job = Job(lab, "first", env=env, steps=1000, step_s=0.1, every=1000, stop_save_s=10)
    lab.wait_for_step(5)
    job.stop()
    assert "JIT checkpoint completed" in lab.output()
    Job(lab, "second", steps=lab.steps()[-1] + 4).wait("succeeded")
    lab.assert_nothing_lost(lab.steps()[-1] + 1, 2)
