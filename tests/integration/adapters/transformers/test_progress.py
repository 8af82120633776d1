"""What a Trainer reports when it stops in training and in an evaluation: progress file and termination log."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers.integrations

from reprieve.testing import Fault, pause
from tests.support.hf_kit import attempt
from tests.support.jobs.hf_jobs import HfJob, Listing
from tests.support.jobs.stop_scenario_jobs import told


def _tells(job: HfJob, *faults: Fault) -> tuple[int, dict[str, Any], dict[str, Any]]:
    """Run an attempt on two ranks and return its exit code, progress file and termination log."""
    folder = Path(job.folder).parent
    file, log = folder / "progress.json", folder / "termination-log"
    log.write_bytes(b"")
    results = attempt(
        job, *faults, ranks=2, TRAINING_PROGRESS_FILE=str(file), PROGRESS_UPDATE_FREQUENCY="1",
        REPRIEVE_TERMINATION_LOG=str(log),
    )  # fmt: skip
    codes = {result.exit_code for result in results}
    assert len(codes) == 1, [str(result) for result in results]
    assert log.stat().st_size <= 4096
    return codes.pop(), json.loads(file.read_text()), json.loads(log.read_text())


@pytest.mark.skipif(
    not hasattr(transformers.integrations, "KubeflowCallback"), reason="this version of transformers tells no server"
)
def test_transformers_own_does_not_tell_the_status_server(tmp_path: Path) -> None:
    """Two callbacks would report different things: transformers' own reports 100 % at any end."""
    job = HfJob(str(tmp_path / "job"), callbacks=(Listing(str(tmp_path)),)).but(report_to=["kubeflow"])
    server = {
        "KUBEFLOW_TRAINER_SERVER_URL": "http://127.0.0.1:9/",
        "KUBEFLOW_TRAINER_SERVER_TOKEN": str(tmp_path / "t"),
    }

    def callbacks(job: HfJob, code: int, *faults: Fault) -> list[str]:
        result = attempt(job, *faults, **server)[0]
        assert result.exit_code == code, str(result)
        return list(json.loads((tmp_path / "callbacks.json").read_text()))

    assert "KubeflowCallback" in callbacks(replace(job, folder=str(tmp_path / "other"), safe=False), 0)
    assert "KubeflowCallback" not in callbacks(job, 143, *told(4))


def test_a_trainer_tells_how_far_it_is(tmp_path: Path) -> None:
    """60 samples in batches of 4 on 2 ranks: 8 steps an epoch, 16 in all."""
    job = HfJob(str(tmp_path / "job")).but(include_num_input_tokens_seen="all", per_device_eval_batch_size=2)

    slow = [pause(0, "forward", 0.5, nth=nth) for nth in (2, 3, 4, 5)]  # a run of less than a second has no throughput
    code, file, log = _tells(job, *slow, *told(6))
    assert code == 143
    assert (file["step"], file["totalSteps"], file["epoch"], file["totalEpochs"]) == (6, 16, 0, 2)
    assert (file["percentComplete"], file["currentEpoch"]) == ("37.5", "0.75")
    assert file["estimatedRemainingSeconds"] > 0 and file["estimatedTimeRemaining"]
    for key in ("loss", "learningRate", "gradientNorm", "samplesPerSecond", "tokensPerSecond"):
        assert float(file[key]) > 0, (key, file)
    assert (file["validationLoss"], file["resumedFromStep"]) == (None, None)
    assert file["checkpointing"]["latestCheckpoint"].endswith("checkpoint-6")
    assert (log["currentStep"], log["progressPercentage"], log["saved"]) == (6, 37, True)
    assert log["estimatedRemainingSeconds"] > 0

    code, file, log = _tells(job, *told(2, "prediction"))
    assert code == 143
    assert (file["step"], file["resumedFromStep"], file["percentComplete"]) == (8, 6, "50.0")
    assert file["estimatedRemainingSeconds"] != 0
    assert log["currentStep"] == 8

    code, file, log = _tells(job)
    assert code == 0
    assert (file["step"], file["resumedFromStep"], file["percentComplete"]) == (16, 8, "100.0")
    assert (file["estimatedRemainingSeconds"], file["currentEpoch"]) == (0, "2.00")
    assert float(file["validationLoss"]) > 0
    assert log["evalMetrics"]["eval_loss"] > 0 and log["trainMetrics"]["loss"] > 0
    assert (log["progressPercentage"], log["state"]) == (100, file["state"])
