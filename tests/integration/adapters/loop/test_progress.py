"""A real run, stopped and started again, and what its progress file and its HTTP server say of it, all along."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from reprieve.checkpoint.folder.catalog import CheckpointInfo, list_checkpoints

KEEP = 2
MORE = 150
"""Steps after the resume: some seconds, time enough to ask how it goes."""
TOKENS = 64
"""Of each sample."""

TRAINING = """
import time
import torch
from torch.utils.data import DataLoader, TensorDataset
import reprieve
from reprieve.testing.faulty_disks import SlowDisk

torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Linear(64, 1024)
loader = DataLoader(TensorDataset(torch.randn(50, 64)), 4, shuffle=True)
run = reprieve.Run("checkpoints", model=model, every=40, keep={keep}, notices="off", disk=SlowDisk(300_000))
for _ in run.epochs(steps={steps}):
    for (batch,) in run.batches(loader):
        loss = model(batch).square().mean()
        loss.backward()
        with torch.no_grad():  # torch.optim imports dynamo, and that takes longer than this job
            for one in model.parameters():
                one -= 0.01 * one.grad
                one.grad = None
        time.sleep(0.02)
        run.step(loss=loss, tokens={tokens} * len(batch))
        run.log(eval_loss=0.5)
        {then}
"""


class Job:
    """In a folder, as a process; what it tells."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        self._env = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("REPRIEVE", "CHECKPOINT"))},
            "TRAINING_PROGRESS_FILE": str(folder / "progress.json"),
            "PROGRESS_UPDATE_FREQUENCY": "1",
            "REPRIEVE_METRICS_PORT": str(self._port),
            "OMP_NUM_THREADS": "1",
        }
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, then: str = "", steps: int = 100_000) -> None:
        script = TRAINING.format(keep=KEEP, steps=steps, tokens=TOKENS, then=then)
        (self.folder / "script.py").write_text(script)
        with (self.folder / "output").open("a") as output:
            self._process = subprocess.Popen(
                [sys.executable, "script.py"], cwd=self.folder, env=self._env, stdout=output, stderr=output
            )

    def terminate(self) -> int:
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        return self.wait()

    def wait(self) -> int:
        assert self._process is not None
        return self._process.wait(60)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def file(self) -> dict[str, Any]:
        return dict(json.loads((self.folder / "progress.json").read_text()))

    def http(self) -> dict[str, Any]:
        """Empty: it does not listen yet."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/progress", timeout=10) as answer:
                return dict(json.load(answer))
        except OSError:
            return {}

    def when(self, true: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
        """What is told over HTTP, once it is like that."""
        assert self._process is not None
        end = time.monotonic() + 60
        while not ((told := self.http()) and true(told)):
            assert self._process.poll() is None, f"it has ended: {(self.folder / 'output').read_text()}"
            assert time.monotonic() < end, f"it does not come to that: {told}"
            time.sleep(0.05)
        return told

    def valid(self) -> list[CheckpointInfo]:
        """The checkpoints, newest first."""
        return [one for one in list_checkpoints(self.folder / "checkpoints") if one.problem is None]


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    one = Job(tmp_path)
    yield one
    one.kill()


def test_what_a_run_tells_from_its_start_to_its_end(job: Job) -> None:
    job.start()
    told = job.when(lambda told: told["samplesPerSecond"] and told["checkpointing"]["savingStep"])
    assert told["checkpointing"]["enabled"]
    assert (told["checkpointing"]["savingStep"] % 40, told["resumedFrom"]) == (0, None)
    assert 0 <= told["checkpointing"]["savingPercentage"] <= 100
    assert 20 < told["samplesPerSecond"] < 200, "four in a little more than 20 ms, on a busy machine"
    assert told["evalMetrics"] == {"eval_loss": 0.5}
    assert set(told["trainMetrics"]) == {"loss"}
    assert told["tokensPerSecond"] == pytest.approx(TOKENS * told["samplesPerSecond"])
    job.when(lambda told: told["checkpointing"]["checkpointsCreated"] > KEEP)
    assert job.terminate() == 143

    told, [newest, *_] = job.file(), job.valid()
    assert (told["state"], told["reason"], told["saved"], told["step"]) == ("stopped", "SIGTERM", True, newest.step)
    assert float(told["validationLoss"]) == 0.5
    assert min(float(told["samplesPerSecond"]), float(told["tokensPerSecond"])) > 0
    assert told["checkpointing"]["latestCheckpoint"] == str(newest.path)
    assert told["checkpointing"]["savingStep"] is None
    created = told["checkpointing"]["checkpointsCreated"]

    job.start(steps=newest.step + MORE)
    told = job.when(lambda told: True)
    assert (told["resumedFrom"], told["resumedFromStep"]) == (newest.path.name, newest.step)
    saves = told["checkpointing"]
    assert (saves["latestCheckpoint"], saves["latestCheckpointBytes"]) == (str(newest.path), newest.bytes)
    assert saves["latestCheckpointTime"] == newest.created.strftime("%Y-%m-%dT%H:%M:%SZ")
    assert saves["checkpointsValid"] >= KEEP and saves["checkpointsCreated"] == created > KEEP
    job.when(lambda told: told["samplesPerSecond"] and told["tokensPerSecond"] and told["estimatedRemainingSeconds"])
    assert job.wait() == 0

    told, found = job.file(), job.valid()
    assert (told["state"], told["step"], told["estimatedTimeRemaining"]) == ("finished", newest.step + MORE, "0s")
    assert told["resumedFrom"] == newest.path.name
    assert told["checkpointing"]["checkpointsValid"] == len(found) == KEEP
    assert told["checkpointing"]["latestCheckpoint"] == str(found[0].path)


def test_an_error_that_nobody_catches_is_told(job: Job) -> None:
    job.start("""if run.steps == 5: raise ValueError("the password=hunter2hunter2 is wrong")""")
    assert job.wait() == 1
    told = job.file()
    assert (told["state"], told["step"]) == ("failed", 5)
    assert told["reason"] == "ValueError: the password=*** is wrong"
