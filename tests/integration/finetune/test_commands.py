"""The commands that users type, as real processes: alone, and in a script under `reprieve run`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.support.finetune_kit import finish
from tests.support.jobs.finetune_jobs import FinetuneJob
from tests.support.launch_kit import REPRIEVE, Lab, Launched, until
from tests.support.places import HIDE_DEEPSPEED

SCRIPT = "import sys\nfrom reprieve.finetune import main\nsys.exit(main())\n"


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    lab = Lab(tmp_path)
    lab.env |= {
        **HIDE_DEEPSPEED,  # and nothing else: it needs datasets and PEFT
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_CACHE": str(tmp_path / "cache"),
        "TOKENIZERS_PARALLELISM": "false",
        "TRAINING_PROGRESS_FILE": str(tmp_path / "progress.json"),
        "PROGRESS_UPDATE_FREQUENCY": "1",
    }
    return lab


@pytest.fixture
def job(tiny: Path, tmp_path: Path) -> FinetuneJob:
    return FinetuneJob(str(tmp_path), str(tiny / "llama"), str(tiny / "chat.jsonl"))


def trains(lab: Lab) -> bool:
    path = lab.folder / "progress.json"
    return path.exists() and json.loads(path.read_text())["step"] > 2


def test_a_script_under_the_launcher(lab: Lab, job: FinetuneJob) -> None:
    """The summary knows what the interruption has cost: the launcher has recorded it."""
    script = lab.folder / "model_train_lora.py"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script), *job.words]
    lab.env["MAX_STEPS"] = "10000"  # it is stopped before
    launched = lab.start(command)
    until(lambda: trains(lab), launched)
    launched.terminate()
    ended = launched.wait()
    assert ended.code == 143, str(ended)
    assert "stopped by SIGTERM: saved at step" in ended.err, str(ended)
    [checkpoint] = job.output.glob("checkpoint-*")
    lab.env["MAX_STEPS"] = str(int(checkpoint.name.partition("-")[2]) + 20)
    ended = lab.run(command)
    assert ended.code == 0, str(ended)
    assert "1 interruption survived, " in ended.out, str(ended)
    assert 0 < sum(job.summary()["lost_s"].values()) < ended.seconds * 10
    assert lab.only_run()["state"] == "finished"
    ended = lab.run([*command, "--learning_rate", "high"])
    assert ended.code == 42, str(ended)
    assert "--learning_rate: 'high': write a number above 0, like 2e-4" in lab.exit_message()


def test_the_command_alone(lab: Lab, job: FinetuneJob, tmp_path: Path) -> None:
    job = job.but(steps=300)
    launched = Launched(lab, [*REPRIEVE, "finetune", *job.words])
    until(lambda: trains(lab), launched)
    launched.terminate()
    ended = launched.wait()
    assert ended.code == 143, str(ended)
    assert len(list(job.output.glob("checkpoint-*"))) == 1, str(ended)
    finish(job)
    undisturbed = FinetuneJob(str(tmp_path / "undisturbed"), job.model, job.data, job.options)
    finish(undisturbed)
    assert job.adapter() == undisturbed.adapter()
