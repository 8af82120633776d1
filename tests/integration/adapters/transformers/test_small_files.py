"""Every small file of an interrupted script (states, configurations, results, model card) equals stock's."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from reprieve.testing import Fault
from tests.support.hf_kit import attempt, ends, stopped, valid
from tests.support.jobs.hf_file_jobs import requested, script, small_files
from tests.support.jobs.hf_jobs import HfJob
from tests.support.jobs.stop_scenario_jobs import told

OFTEN = {"eval_strategy": "steps", "eval_steps": 3, "save_strategy": "steps", "save_steps": 3, "logging_steps": 2}
CHECKPOINTS = {"checkpoint-3", "checkpoint-6", "checkpoint-9", "checkpoint-12"}


def _job(folder: Path, **options: Any) -> HfJob:
    """12 steps in 2 epochs. Each of the 4 evaluations, and the one after training, has 3 batches."""
    job = HfJob(str(folder), trainer="seq2seq", samples=24, **options)
    return job.but(**OFTEN, metric_for_best_model="loss", per_device_eval_batch_size=4)


def _run(job: HfJob, *faults: Fault) -> int | None:
    return attempt(job, *faults, fn=script)[0].exit_code


@pytest.fixture(scope="module")
def stock_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    job = _job(tmp_path_factory.mktemp("stock"), safe=False)
    assert _run(job) == 0
    files = small_files(job)
    assert {"README.md", "generation_config.json", "checkpoint-12/trainer_state.json"} <= files.keys()
    return files


@pytest.mark.parametrize(
    "faults",
    [
        pytest.param(told(5), id="in training"),
        pytest.param(told(2, "prediction"), id="in an evaluation"),
        pytest.param(told(11, "prediction"), id="in the last evaluation"),
        pytest.param(told(2, "save"), id="in a save"),
        pytest.param(told(1, "trained"), id="after training"),
        pytest.param(told(1, "saved the model"), id="after save_model"),
        pytest.param(told(16, "prediction"), id="in predict"),
    ],
)
def test_a_script_that_is_stopped_once(faults: list[Fault], tmp_path: Path, stock_files: dict[str, Any]) -> None:
    job = _job(tmp_path)
    assert _run(job, *faults) != 0
    assert _run(job) == 0
    assert requested(job) == CHECKPOINTS
    found = small_files(job)
    others = {name for name in found if name.startswith("checkpoint-") and name.split("/")[0] not in CHECKPOINTS}
    assert {name: text for name, text in found.items() if name not in others} == stock_files


def test_the_same_under_reprieve_without_a_stop(tmp_path: Path, stock_files: dict[str, Any]) -> None:
    """It also runs once more after it has finished, and writes no checkpoint again."""
    job = _job(tmp_path)
    for _ in range(2):
        assert _run(job) == 0
        assert small_files(job) == stock_files
    attempts = [json.loads(path.read_text())["manifest"]["attempt"] for path in tmp_path.rglob("reprieve-m*.json")]
    assert attempts == [1] * 4


def test_the_evaluation_that_was_due_is_in_what_is_saved_at_the_end(tmp_path: Path) -> None:
    """The script itself saves nothing. A second stop, after the evaluation, does not lose the evaluation either."""
    job = replace(HfJob(str(tmp_path)), samples=24).but(
        eval_strategy="steps", eval_steps=3, save_strategy="no", max_steps=6, per_device_eval_batch_size=4
    )
    stopped(job, *told(2, "prediction"))
    assert _evaluated(job, 3) == []
    stopped(job, *told(3, "prediction"))  # its last batch
    assert _evaluated(job, 3) == [3]
    stopped(job, *told(2, "prediction"))
    assert _evaluated(job, 6) == [3]
    ends(job)
    assert _evaluated(job, 6) == [3, 6]
    assert valid(job) == [6, 3]


def _evaluated(job: HfJob, checkpoint: int) -> list[int]:
    """Return the steps whose evaluation is in the log of a checkpoint."""
    state = json.loads((job.output / f"checkpoint-{checkpoint}" / "trainer_state.json").read_text())
    return [entry["step"] for entry in state["log_history"] if "eval_loss" in entry]
