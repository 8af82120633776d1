"""Checkpoints of release 0.1.0 resume exactly with the present code.

tests/fixtures/checkpoints/ holds them, with the script that made them. Each was stopped in the middle of an epoch.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from reprieve.testing import run_ranks
from tests.fixtures.checkpoints.make import STOP_AFTER, train_loop, train_trainer
from tests.support.jobs.hf_jobs import PRELOAD
from tests.support.places import FIXTURES

OLD = FIXTURES / "checkpoints"
KINDS: dict[str, tuple[int, Callable[..., Any]]] = {
    "loop": (1, train_loop),
    "loop_2_ranks": (2, train_loop),
    "trainer": (1, train_trainer),
}


def _train(kind: str, folder: Path) -> list[dict[str, Any]]:
    """Train to the end and return the losses and the weights of each rank."""
    ranks, train = KINDS[kind]
    modules = PRELOAD if train is train_trainer else ()
    results = run_ranks(ranks, train, str(folder), backend="gloo" if ranks > 1 else None, modules=modules)
    assert all(result.ok for result in results), "\n\n".join(map(str, results))
    return [result.value for result in results]


@pytest.mark.parametrize("kind", KINDS)
def test_an_old_checkpoint_resumes_exactly(kind: str, tmp_path: Path) -> None:
    (tmp_path / "undisturbed").mkdir()
    undisturbed = _train(kind, tmp_path / "undisturbed")
    shutil.copytree(OLD / kind, tmp_path / "resumed")
    [checkpoint] = (tmp_path / "resumed").glob("*/checkpoint-*")
    step = int(checkpoint.name.removeprefix("checkpoint-"))
    assert step >= STOP_AFTER[kind]
    resumed = _train(kind, tmp_path / "resumed")
    for expected, found in zip(undisturbed, resumed, strict=True):
        steps = expected["losses"].keys() if kind == "trainer" else range(step + 1, len(expected["losses"]) + 1)
        assert found["losses"] == {number: expected["losses"][number] for number in steps}
        assert found["weights"] == expected["weights"]


def test_every_old_checkpoint_is_tested() -> None:
    assert {path.name for path in OLD.iterdir() if path.is_dir() and path.name != "__pycache__"} == set(KINDS)
