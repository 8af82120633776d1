"""`reprieve run torchrun` in a pod: what people look for in its log, and what an operator reads over HTTP."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from tests.support.launch_kit import Ended, Lab, until


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    lab = Lab(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    lab.env |= {
        "KUBERNETES_SERVICE_HOST": "10.96.0.1",
        "POD_IP": "127.0.0.1",
        "REPRIEVE_METRICS_PORT": str(port),
        "REPRIEVE_RUN": "5c1f3d6e",
    }
    return lab


def training_progress(lab: Lab) -> Any:
    try:
        with urlopen(f"http://127.0.0.1:{lab.env['REPRIEVE_METRICS_PORT']}/trainingProgress", timeout=10) as answer:
            return json.load(answer)
    except OSError:
        return None


def stop_once(lab: Lab, made: int) -> tuple[Any, Ended]:
    """Start the job, and stop it once so many checkpoints were made. Returns its progress before the stop."""
    found: list[Any] = []

    def is_there() -> bool:
        found[:] = [training_progress(lab)]
        return found[0] is not None and found[0]["checkpointing"]["checkpointsCreated"] >= made

    launched = lab.start(lab.torchrun(2, steps=500, step_s=0.1, every=2))
    until(is_there, launched)
    launched.terminate()
    return found[0], launched.wait()


def test_its_log_and_its_progress_in_two_attempts(lab: Lab) -> None:
    created = 0
    for restarts in (0, 1):
        found, ended = stop_once(lab, made=created + 5)
        assert ended.code == 143, str(ended)
        assert (found["run"], found["restarts"]) == ("5c1f3d6e", restarts)
        created = found["checkpointing"]["checkpointsCreated"]
        assert created <= found["step"] / 2 + restarts + 1, "each stop makes one, and every second step"
        assert found["checkpointing"]["lastSaveDuration"].endswith("s")
        listed = found["checkpointing"]["availableCheckpoints"]
        assert listed and all(each["valid"] for each in listed)
        assert [each["step"] for each in listed] == sorted((each["step"] for each in listed), reverse=True)
        assert [line for line in (ended.out + ended.err).splitlines() if "jit" in line.lower()] == [
            "[Kubeflow] JIT checkpoint signal handler registered for SIGTERM",
            "[Kubeflow] JIT checkpointing enabled",
        ], str(ended)
