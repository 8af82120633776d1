"""The termination log of a pod: whole JSON with the step and the exit message, however the run ended."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from reprieve.launch.process import descendants
from tests.support.launch_kit import Lab, until


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return Lab(tmp_path)


def test_stopped_in_training(lab: Lab) -> None:
    launched = lab.start(lab.python(steps=500, step_s=0.1))
    until(lambda: lab.steps() >= 3, launched)
    launched.terminate()
    assert launched.wait().code == 143
    found = lab.termination()
    assert (found["state"], found["currentStep"], found["saved"]) == ("stopped", lab.steps(), True)
    assert found["step"] == found["currentStep"]
    assert found["message"].startswith(f"stopped by SIGTERM: saved at step {lab.steps()}")


def test_stopped_before_anything_was_trained(lab: Lab) -> None:
    launched = lab.start([sys.executable, "-c", "print('ready', flush=True); import time; time.sleep(60)"])
    assert launched.process.stdout is not None
    assert launched.process.stdout.readline() == "ready\n"
    launched.terminate()
    assert launched.wait().code == 143
    found = lab.termination()
    assert (found["state"], found["currentStep"]) == ("stopped", 0)
    assert found["message"].startswith("stopped by SIGTERM")


def test_killed_at_the_deadline(lab: Lab) -> None:
    """The training process is stuck in the kernel, as with storage that does not respond."""
    launched = lab.start(lab.python(steps=500, step_s=0.3), "--grace-period", "1s")
    until(lambda: lab.steps() >= 3, launched)
    [rank] = descendants(launched.pid)
    os.kill(rank, signal.SIGSTOP)
    launched.terminate()
    assert launched.wait().code == 143
    found = lab.termination()
    assert found["state"] == "stopped" and found["currentStep"] >= 2, found
    assert f"step {found['currentStep']} is NOT SAVED" in found["message"], found
    assert found["message"].endswith("It did not end in time and was killed"), found


@pytest.mark.parametrize(
    ("variables", "reason"),
    [
        ({"REPRIEVE_GRACE": "soon"}, "REPRIEVE_GRACE: 'soon' is not a duration"),
        ({"CHECKPOINT_INTERVAL": "often"}, "every='often' is not understood"),
        ({"CHECKPOINT_INTERVAL": "5m", "CHECKPOINT_STRATEGY": "steps"}, "CHECKPOINT_STRATEGY=steps"),
    ],
)
def test_refused_by_the_launcher(lab: Lab, variables: dict[str, str], reason: str) -> None:
    lab.env |= variables
    assert lab.run(["true"]).code == 42
    found = lab.termination()
    assert found["state"] == "failed" and reason in found["message"], found


def test_refused_by_the_training_process(lab: Lab) -> None:
    assert lab.run(lab.python(every="often")).code == 42
    found = lab.termination()
    assert found["state"] == "failed" and "ConfigError: every='often' is not understood" in found["message"], found


def test_a_command_that_does_not_exist(lab: Lab) -> None:
    assert lab.run(["trian"]).code == 127
    assert lab.exit_message().startswith("trian: no such command")
