"""Checkpoints of release 0.1.0 resume exactly with the present code.

tests/fixtures/checkpoints/ holds them, with the script that made them. Each was stopped in the middle of an epoch.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from reprieve.testing import run_ranks
from tests.fixtures.checkpoints.make import STOP_AFTER, step_of, train_loop, train_trainer
from tests.support.jobs.hf_jobs import PRELOAD
from tests.support.places import FIXTURES

OLD = FIXTURES / "checkpoints"
KINDS: dict[str, tuple[int, Callable[..., Any]]] = {
    "loop": (1, train_loop),
    "loop_2_ranks": (2, train_loop),
    "trainer": (1, train_trainer),
}


def _train(kind: str, folder: Path, *, adopt: Path | None = None) -> list[dict[str, Any]]:
    """Train to the end and return the losses and the weights of each rank."""
    ranks, train = KINDS[kind]
    modules = PRELOAD if train is train_trainer else ()
    arguments = (str(folder), None, adopt and str(adopt))
    results = run_ranks(ranks, train, *arguments, backend="gloo" if ranks > 1 else None, modules=modules)
    assert all(result.ok for result in results), "\n\n".join(map(str, results))
    return [result.value for result in results]


@pytest.mark.parametrize("kind", KINDS)
def test_an_old_checkpoint_resumes_exactly(kind: str, tmp_path: Path) -> None:
    [checkpoint] = (OLD / kind).glob("*/checkpoint-*")
    step = step_of(str(checkpoint))
    assert step >= STOP_AFTER[kind]
    (tmp_path / "undisturbed").mkdir()
    undisturbed = _train(kind, tmp_path / "undisturbed", adopt=checkpoint)
    shutil.copytree(OLD / kind, tmp_path / "resumed")
    resumed = _train(kind, tmp_path / "resumed")
    log = json.loads((checkpoint / "trainer_state.json").read_text())["log_history"] if kind == "trainer" else ()
    before = {entry["step"]: entry["loss"].hex() for entry in log}
    for expected, found in zip(undisturbed, resumed, strict=True):
        after = {number: loss for number, loss in expected["losses"].items() if number > step}
        assert len(after) >= 5
        assert found["losses"] == before | after
        assert found["weights"] == expected["weights"]


def test_every_old_checkpoint_is_tested() -> None:
    assert {path.name for path in OLD.iterdir() if path.is_dir() and path.name != "__pycache__"} == set(KINDS)
