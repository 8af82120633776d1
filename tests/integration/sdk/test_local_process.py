"""The LocalProcess backend from end to end. Once: it makes a virtual environment and installs torch into it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from kubeflow.trainer import LocalProcessBackendConfig

from reprieve.errors import ConfigError
from reprieve.kubeflow import TrainerClient, TransformersTrainer
from reprieve.kubernetes.jobs.state import JobState
from tests.support.launch_kit import until
from tests.support.notebook_training import make_inputs, train_func
from tests.support.places import HIDE_OPTIONAL, ROOT, SITE
from tests.support.wheels import make_wheel

STEPS = 60
SLOW_FROM = 6
"""A minute lies between this step and the end, unless the test ends that."""
INSTALL_S = 600
"""torch is downloaded."""
START_S = 120
PIP = {"PIP_NO_DEPS": "1", "PIP_NO_COMPILE": "1"}
"""torch would bring gigabytes for GPUs. What torch and transformers need comes from this environment."""


def wheel(folder: Path) -> str:
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", f"--wheel-dir={folder}", str(ROOT)]
    subprocess.run(command, check=True)
    [found] = folder.glob("reprieve-*.whl")
    return str(found)


def borrowed_packages(folder: Path) -> str:
    """A wheel that makes the packages of this environment visible, behind those that are installed."""
    path = make_wheel(folder, "borrowed", {"borrowed.pth": sysconfig.get_path("purelib") + "\n"})
    return f"borrowed @ {path.as_uri()}"


@pytest.mark.timeout(2 * (INSTALL_S + START_S))
def test_a_function_is_paused_and_continues_when_it_is_submitted_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_inputs(f"{tmp_path}/model", f"{tmp_path}/data.json")
    monkeypatch.setenv("REPRIEVE_STATE_DIR", f"{tmp_path}/state")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    environment = {**HIDE_OPTIONAL, **PIP, "PYTHONPATH": str(SITE)}
    arguments = {"model_path": f"{tmp_path}/model", "data_path": f"{tmp_path}/data.json", "record": str(tmp_path)}
    trainer = TransformersTrainer(
        func=train_func,
        func_args={**arguments, "steps": STEPS, "pause_s": 1, "slow_from": SLOW_FROM},
        output_dir="checkpoints",
        env={**environment, "HF_HUB_OFFLINE": "1"},
        metrics_port=28099,
        reprieve=wheel(tmp_path / "wheels"),
        packages_to_install=["torch==2.13.0", borrowed_packages(tmp_path)],
    )
    client = TrainerClient(LocalProcessBackendConfig())
    job = client.train(runtime="torch-distributed", trainer=trainer)
    steps = tmp_path / "steps-0"
    until(lambda: is_over(client, job) or client.progress(job).state != JobState.PENDING, limit_s=INSTALL_S)
    until(
        lambda: is_over(client, job) or (steps.exists() and len(steps.read_text().split()) >= SLOW_FROM),
        limit_s=START_S,
    )
    assert not is_over(client, job), "\n".join(client.get_job_logs(job))
    assert client.progress(job).state == JobState.RUNNING
    outcome = client.pause(job)
    assert outcome.is_saved and outcome.step is not None and outcome.step >= SLOW_FROM, outcome
    assert client.progress(job).state == JobState.PAUSED
    assert [each.step for each in client.checkpoints(job)] == [outcome.step]

    (tmp_path / "hurry").touch()
    again = client.train(runtime="torch-distributed", trainer=trainer)
    assert client.wait(again, timeout=INSTALL_S + START_S).state == JobState.SUCCEEDED
    done = [int(step) for step in steps.read_text().split()]
    assert done == list(range(1, STEPS + 1)), "no step is done twice"
    found = json.loads((tmp_path / "losses.json").read_text())
    assert found["output_dir"] == f"{tmp_path}/checkpoints" and len(found["losses"]) == STEPS
    assert (tmp_path / "checkpoints/final/model.safetensors").is_file()


def is_over(client: TrainerClient, job: str) -> bool:
    return client.get_job(job).status in ("Failed", "Complete")


def test_a_claim_is_refused_where_there_are_none() -> None:
    client = TrainerClient(LocalProcessBackendConfig())
    trainer = TransformersTrainer(func=train_func_without_arguments, output_dir="pvc://shared/run")
    with pytest.raises(ConfigError, match="processes of this machine have no claims"):
        client.train(runtime="torch-distributed", trainer=trainer)


def train_func_without_arguments() -> None: ...
