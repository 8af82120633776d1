"""What the submitter of a job sets in place of the script's TrainingArguments, in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from reprieve.submitted_arguments import VARIABLE, SubmittedArguments
from tests.support.places import HIDE_OPTIONAL, SITE

SCRIPT = """
import json, sys
import torch
from transformers import Trainer, TrainingArguments

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 1)

    def forward(self, x):
        return {"loss": self.linear(x).pow(2).mean()}

data = [{"x": torch.ones(4)} for _ in range(8)]
common = {"report_to": "none", "use_cpu": True, "max_steps": 4, "per_device_train_batch_size": 2}
found = []
for options in json.loads(sys.argv[1]):
    args = TrainingArguments(**{"output_dir": "placeholder", **common, **options})
    trainer = Trainer(Model(), args, train_dataset=data, eval_dataset=data)
    names = ("output_dir", "save_steps", "save_total_limit")
    strategy = trainer.args.save_strategy
    found.append([*(getattr(trainer.args, name) for name in names), getattr(strategy, "value", strategy)])
print(json.dumps(found), flush=True)
if "train" in sys.argv:
    trainer.train()
    trainer.save_model(f"{trainer.args.output_dir}/final")
"""


def run(
    tmp_path: Path, submitted: SubmittedArguments, *options: dict[str, Any], train: bool = False
) -> subprocess.CompletedProcess[str]:
    (tmp_path / "train.py").write_text(SCRIPT)
    env = {
        **os.environ,
        **HIDE_OPTIONAL,
        "PYTHONPATH": str(SITE),
        "REPRIEVE_STATE_DIR": str(tmp_path / "state"),
        "TRAINING_PROGRESS_FILE": str(tmp_path / "progress.json"),
        VARIABLE: submitted.to_json(),
    }
    command = [sys.executable, "-m", "reprieve", "run", "train.py", json.dumps(options), *(["train"] if train else [])]
    return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)


def test_arguments_are_replaced_before_the_trainer_is_made(tmp_path: Path) -> None:
    folder = str(tmp_path / "volume")
    submitted = SubmittedArguments(output_dir=folder, save_strategy="steps", save_steps=2, save_total_limit=1)
    best = {"load_best_model_at_end": True, "eval_strategy": "epoch", "save_strategy": "epoch", "save_total_limit": 7}
    done = run(tmp_path, submitted, best, {"save_strategy": "no"}, train=True)
    assert done.returncode == 0, done.stderr
    with_best, plain = json.loads(done.stdout.splitlines()[0])
    assert (with_best[0], with_best[2:]) == (folder, [7, "epoch"]), "the best model needs the script's own strategy"
    assert plain == [folder, 2, 1, "steps"]
    assert f"[Kubeflow] output_dir: {folder} (the script: placeholder)" in done.stderr
    assert "save_strategy=steps is not used: the script loads the best model at the end" in done.stderr
    assert sorted(each.name for each in Path(folder).iterdir() if each.name[0] != ".") == ["checkpoint-4", "final"]
    assert not (tmp_path / "placeholder").exists()


def test_a_job_that_is_not_protected_only_reports(tmp_path: Path) -> None:
    done = run(tmp_path, SubmittedArguments(protected=False), {"save_strategy": "no"}, train=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[0])[0][0] == "placeholder"
    progress = json.loads((tmp_path / "progress.json").read_text())
    assert (progress["step"], progress["totalSteps"]) == (4, 4)
    assert list((tmp_path / "placeholder").glob("checkpoint-*")) == [], "nothing is saved"


def test_checkpoints_without_an_optimizer_are_a_permanent_failure(tmp_path: Path) -> None:
    done = run(tmp_path, SubmittedArguments(output_dir="volume"), {"save_only_model": True}, train=True)
    assert done.returncode == 42 and "save_only_model=True" in done.stderr


@pytest.mark.parametrize("text", ["[1", '"a"', '{"version": 2}'])
def test_a_variable_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=VARIABLE):
        SubmittedArguments.from_environment({VARIABLE: text})
