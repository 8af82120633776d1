"""TensorBoard, W&B and MLflow, the real packages: a run that was stopped and resumed is one run there too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from reprieve.testing import Fault, run_ranks
from tests.support.hf_kit import attempt
from tests.support.jobs.hf_jobs import PRELOAD, HfJob, seen
from tests.support.jobs.hf_tracker_jobs import (
    on_mlflow,
    on_tensorboard,
    on_wandb,
    train_and_begin_another,
    train_in_own_runs,
)
from tests.support.jobs.stop_scenario_jobs import told

STEPS = list(range(1, 13))


@pytest.fixture(scope="module", autouse=True)
def nothing_is_sent() -> Iterator[None]:
    """Configure the packages before their import."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_MODE", "offline")
        patch.setenv("WANDB_ERROR_REPORTING", "false")
        patch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
        patch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # otherwise it needs a database, and imports all of MLflow
        yield


@dataclass(frozen=True)
class Followed:
    """A job, and where its experiment trackers write."""

    root: Path

    @property
    def job(self) -> HfJob:
        return HfJob(str(self.root / "job")).but(
            report_to=["tensorboard", "wandb", "mlflow"], max_steps=12, logging_steps=1, eval_strategy="steps",
            eval_steps=6, save_strategy="no",
        )  # fmt: skip

    @property
    def mlflow(self) -> str:
        return (self.root / "mlflow").as_uri()

    def run(self, fn: Callable[[HfJob], None], *faults: Fault, **env: str) -> str:
        """Run an attempt and return its output."""
        env |= {"WANDB_DIR": str(self.root), "MLFLOW_TRACKING_URI": self.mlflow}
        result = attempt(self.job, *faults, fn=fn, **env)[0]
        assert result.exit_code == (143 if faults else 0), str(result)
        return result.output

    def found(self, look: Callable[[str], Any], where: str | None = None) -> Any:
        """Call a function in a process that has imported the packages."""
        result = run_ranks(1, look, where or str(self.root), backend=None, modules=PRELOAD)[0]
        assert result.ok, str(result)
        return result.value

    @property
    def losses(self) -> list[float]:
        """The losses that the trainer has logged."""
        return [entry["loss"] for entry in seen(self.job.folder)["end-0.json"]["log"] if "loss" in entry]


@pytest.fixture(scope="module")
def followed(tmp_path_factory: pytest.TempPathFactory) -> Followed:
    """Stopped in a step, and then in an evaluation."""
    followed = Followed(tmp_path_factory.mktemp("followed"))
    (followed.root / "wandb").mkdir()
    followed.run(train_and_begin_another, *told(4))
    followed.run(train_and_begin_another, *told(1, "prediction"))
    followed.run(train_and_begin_another)
    return followed


def test_tensorboard_has_one_folder(followed: Followed) -> None:
    (curve,) = followed.found(on_tensorboard).values()
    assert [step for step, _ in curve] == STEPS
    assert [loss for _, loss in curve] == pytest.approx(followed.losses)


def test_wandb_has_one_run(followed: Followed) -> None:
    runs = followed.found(on_wandb)
    (curves,) = (curves for curves in runs.values() if any(curves))
    assert [[step for step, _ in curve] for curve in curves] == [STEPS[:4], STEPS[4:6], STEPS[6:]]
    assert [loss for curve in curves for _, loss in curve] == pytest.approx(followed.losses)


def test_a_run_of_wandb_that_is_begun_afterwards_is_another(followed: Followed) -> None:
    assert [len(curves) for curves in followed.found(on_wandb).values()] == [3, 1]


def test_mlflow_has_one_run(followed: Followed) -> None:
    ((status, curve),) = followed.found(on_mlflow, followed.mlflow).values()
    assert status == "FINISHED"
    assert [step for step, _ in curve] == STEPS
    assert [loss for _, loss in curve] == pytest.approx(followed.losses)


def test_what_the_script_says_holds(tmp_path: Path) -> None:
    """The script starts its runs itself and sets TensorBoard's folder."""
    followed = Followed(tmp_path)
    (tmp_path / "wandb").mkdir()
    outputs = [
        followed.run(train_in_own_runs, *faults, TENSORBOARD_LOGGING_DIR=str(tmp_path / folder))
        for faults, folder in ((told(4), "first"), ((), "second"))
    ]
    assert "has started a" not in outputs[0]
    assert "the script has started a wandb run itself" in outputs[1]
    assert "the script has started a mlflow run itself" in outputs[1]
    parts = [STEPS[:4], STEPS[4:]]
    boards = followed.found(on_tensorboard)
    assert [[step for step, _ in boards[name]] for name in ("first", "second")] == parts
    assert [[step for step, _ in curve] for (curve,) in followed.found(on_wandb).values()] == parts
    runs = followed.found(on_mlflow, followed.mlflow).values()
    assert sorted([step for step, _ in curve] for _, curve in runs) == parts
