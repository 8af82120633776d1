"""The Container backend, without Docker: what it would start, and what the client says about it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from kubeflow.trainer import ContainerBackendConfig, Runtime, RuntimeTrainer, TrainerType
from kubeflow.trainer.backends.container.backend import ContainerBackend
from kubeflow.trainer.types.types import RuntimeKind

from reprieve.errors import ConfigError
from reprieve.kubeflow import PeriodicCheckpointConfig, TrainerClient, TransformersTrainer

RUNTIME = Runtime(
    name="torch-distributed",
    kind=RuntimeKind.CLUSTER_TRAINING_RUNTIME,
    trainer=RuntimeTrainer(trainer_type=TrainerType.CUSTOM_TRAINER, framework="torch", image="torch:1"),
)


class Containers:
    """What the backend asks Docker for."""

    _runtime_type = "docker"

    def __init__(self) -> None:
        self.created: list[dict[str, Any]] = []

    def create_network(self, **_: Any) -> str:
        return "network"

    def image_exists(self, _: str) -> bool:
        return True

    def create_and_start_container(self, **options: Any) -> str:
        self.created.append(options)
        return "container"


@pytest.fixture
def containers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Containers:
    found = Containers()
    monkeypatch.setattr(ContainerBackend, "_create_adapter", lambda self: found)
    monkeypatch.setenv("HOME", str(tmp_path))
    return found


def train_func() -> None:
    import os

    for name in ("CHECKPOINT_INTERVAL", "REPRIEVE_KILL_WAIT", "REPRIEVE_METRICS_PORT", "REPRIEVE_TRAINING_ARGUMENTS"):
        print(os.environ[name])


def submit(**fields: Any) -> TrainerClient:
    client = TrainerClient(ContainerBackendConfig(pull_policy="Never"))
    client.train(runtime=RUNTIME, trainer=TransformersTrainer(func=train_func, **fields))
    return client


def test_a_container_gets_the_settings_of_the_trainer(containers: Containers, tmp_path: Path) -> None:
    config = PeriodicCheckpointConfig(save_interval="10m")
    submit(output_dir="run", periodic_checkpoint_config=config, kill_wait=2, metrics_port=28099)
    [container] = containers.created
    script = container["command"][-1].partition("'TRAINING_SCRIPT_EOF'\n")[2].partition("TRAINING_SCRIPT_EOF")[0]
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path, env=os.environ)
    assert done.returncode == 0, done.stderr
    interval, wait, port, arguments = done.stdout.splitlines()
    assert (interval, wait, port) == ("600000ms", "2", "28099")
    assert '"output_dir": "run"' in arguments


@pytest.mark.parametrize(
    ("output_dir", "is_lost"),
    [
        ("run", False),
        ("/workspace/run", False),
        ("/tmp/run", True),
        ("~/run", True),
        ("pvc://shared/run", True),
        (None, False),
    ],
)
def test_a_folder_that_is_lost_with_the_container_is_named(
    containers: Containers, caplog: pytest.LogCaptureFixture, output_dir: str | None, is_lost: bool
) -> None:
    submit(output_dir=output_dir, enable_jit_checkpoint=True)
    assert "the Container backend does not pass SIGTERM on" in caplog.text
    assert ("are lost with the container" in caplog.text) == is_lost
    assert len(containers.created) == 1


def test_verbs_are_refused_with_the_reason(containers: Containers) -> None:
    client = submit()
    for verb in (client.pause, client.resume, client.progress, client.checkpoints, client.wait):
        with pytest.raises(ConfigError, match="use Kubernetes or LocalProcess"):
            verb("job")
