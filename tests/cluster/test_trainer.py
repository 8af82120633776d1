"""A fine-tuning job with transformers' Trainer, LoRA and evaluations, as users write them: the script is unchanged."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.kit.objects import pod_spec, reprieve_runtime, train_job
from tests.cluster.kit.pod_watch import PodWatch
from tests.cluster.kit.training import apply_train_jobs
from tests.cluster.rig.kubectl import Kubectl, has_condition
from tests.support.launch_kit import until
from tests.support.places import HF_SCRIPTS

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]

SCRIPT = str(HF_SCRIPTS / "with_lora.py")
ENVIRONMENT = {"HF_HUB_OFFLINE": "1"}
START_S = 180
"""How long a pod may take to train its first step: importing the Trainer takes several times as long as torch."""


def test_a_trainer_that_is_deleted_in_training_and_in_evaluation(
    namespace: Kubectl, pods: PodWatch, tmp_path: Path
) -> None:
    folder = tmp_path / "job"
    folder.mkdir()
    spec = pod_spec(container="node", with_host_python=True, folders=[folder], environment=ENVIRONMENT)
    command = [sys.executable, "-m", "reprieve", "run", "python", SCRIPT, str(folder), "0.3"]
    namespace.apply(reprieve_runtime("reprieve-torch", spec, max_restarts=1))
    apply_train_jobs(namespace, train_job("finetune", command, runtime="reprieve-torch"))
    at_batch: dict[str, Callable[[list[Any]], bool]] = {
        "training": lambda batch: batch[0] == "train" and batch[1] >= 3,
        "evaluation": lambda batch: batch == ["evaluate", 20],
    }
    for number, (name, is_there) in enumerate(at_batch.items(), start=1):
        until(lambda is_there=is_there: is_there(_last_batch(folder)), limit_s=START_S)
        [pod] = pods.running()
        namespace.delete("pod", pod.name, wait=False)
        pods.wait_for(lambda watch, number=number: len(watch.ended()) == number, f"deleted in {name}")
        end = pods.ended()[-1]
        assert end.exit_code == 143, f"{name}\n{pods.history()}"
        assert "saved at step" in json.loads(end.message)["message"], f"{name}: {end.message}"
    namespace.wait_for("trainjob", "finetune", has_condition("Complete"), timeout_s=START_S)
    assert namespace.get("jobset", "finetune")["status"].get("restartsCountTowardsMax", 0) == 0
    assert [pod.exit_code for pod in pods.ended()] == [143, 143, 0], pods.history()

    undisturbed = tmp_path / "undisturbed"
    undisturbed.mkdir()
    subprocess.run([sys.executable, SCRIPT, str(undisturbed), "0"], check=True, cwd=undisturbed)
    assert json.loads((folder / "end.json").read_text()) == json.loads((undisturbed / "end.json").read_text())


def _last_batch(folder: Path) -> list[Any]:
    path = folder / "batches.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return list(json.loads(lines[-1])) if lines else ["", 0]
