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
        return {"step": 0}


def stop_at(lab: Lab, step: int) -> tuple[Any, Ended]:
    """Start the job, and stop it once it is there. Returns its progress before the stop."""
    launched = lab.start(lab.torchrun(2, steps=500, step_s=0.1, every=2))
    until(lambda: training_progress(lab)["step"] >= step, launched)
    found = training_progress(lab)
    launched.terminate()
    return found, launched.wait()


def test_its_log_and_its_progress_in_two_attempts(lab: Lab) -> None:
    for attempt, step in ((1, 9), (2, 17)):
        found, ended = stop_at(lab, step)
        assert ended.code == 143, str(ended)
        assert (found["run"], found["restarts"], found["state"]) == ("5c1f3d6e", attempt - 1, "training")
        listed = found["checkpointing"]["availableCheckpoints"]
        assert listed and all(each["valid"] for each in listed)
        assert [each["step"] for each in listed] == sorted((each["step"] for each in listed), reverse=True)
        assert found["checkpointing"]["checkpointsCreated"] >= step // 2 - 1, "more than retention keeps"
        assert [line for line in (ended.out + ended.err).splitlines() if "jit" in line.lower()] == [
            "[Kubeflow] JIT checkpoint signal handler registered for SIGTERM",
            "[Kubeflow] JIT checkpointing enabled",
        ], str(ended)
