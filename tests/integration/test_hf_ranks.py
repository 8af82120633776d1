"""Trainers on several ranks: one rank is told, all stop; other ranks go on."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from .hf_jobs import HfJob, seen
from .hf_kit import attempt, goes_on, stopped, undisturbed
from .stop_scenario_jobs import told


@pytest.fixture
def job(tmp_path: Path) -> HfJob:
    return HfJob(str(tmp_path / "job"), samples=48)


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (2, 3)])
def test_another_number_of_ranks(job: HfJob, before: int, after: int) -> None:
    """48 samples in batches of 4: what was not seen of the first epoch is dealt out, and nothing else."""
    steps = 24 // (4 * before)
    stopped(job, *told(steps, rank=before - 1), ranks=before)
    results = attempt(job.but(num_train_epochs=1), ranks=after)
    for result in results:
        assert result.ok, str(result)
    said = f"written by {before} ranks with 1 batches of 4 in a step, these are {after} with 1 of 4"
    assert said in results[0].output
    found: Counter[str] = Counter()
    for name, lines in seen(job.folder).items():
        if name.startswith("losses"):
            found.update(sample for _, _, samples in lines for sample in samples)
    assert len(found) == 48
    assert set(found.values()) == {1}


def test_accumulation_on_ranks(job: HfJob) -> None:
    job = job.but(gradient_accumulation_steps=2)
    stopped(job, *told(5, rank=1), ranks=2)
    assert goes_on(job, 2) == undisturbed(job, 2)


def test_the_best_model_on_ranks(job: HfJob) -> None:
    """The save of the best checkpoint has a barrier in it."""
    job = job.but(load_best_model_at_end=True, save_total_limit=1, learning_rate=3e-2, num_train_epochs=3)
    stopped(job, *told(7, rank=1), ranks=2)
    assert goes_on(job, 2) == undisturbed(job, 2)
