"""Trainers on several ranks: a stop request to any rank stops all, and another number of ranks can resume."""

from __future__ import annotations

import math
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.hf_kit import attempt, stopped, train_to_end, undisturbed
from tests.support.jobs.hf_jobs import HfJob, seen
from tests.support.jobs.stop_scenario_jobs import told


@pytest.fixture
def job(tmp_path: Path) -> HfJob:
    return HfJob(str(tmp_path / "job"), samples=48)


def _samples(job: HfJob) -> Counter[str]:
    """Count how often each sample was trained with."""
    lines = [lines for name, lines in seen(job.folder).items() if name.startswith("losses")]
    return Counter(sample for records in lines for _, _, samples in records for sample in samples)


@pytest.mark.parametrize(
    ("before", "after", "steps", "more"),
    [
        (2, 1, 3, {}),
        (2, 3, 1, {}),  # 8 samples, in batches of 12 from there
        (3, 2, 1, {}),
        (1, 2, 3, {"dataloader_num_workers": 2}),
        (1, 1, 3, {"per_device_train_batch_size": 8}),
        (1, 3, 2, {"gradient_accumulation_steps": 2}),
        (2, 3, 1, {"dataloader_drop_last": True}),
    ],
)
def test_other_batches(tmp_path: Path, before: int, after: int, steps: int, more: dict[str, int]) -> None:
    """44 samples in batches of 4: exactly the rest of the epoch is redistributed, and the loop counts its steps."""
    job = HfJob(str(tmp_path / "job"), samples=44).but(num_train_epochs=1)
    stopped(job, *told(steps, rank=before - 1), ranks=before)
    results = attempt(job.but(**more), ranks=after)
    for result in results:
        assert result.ok, str(result)
    size, count = more.get("per_device_train_batch_size", 4), more.get("gradient_accumulation_steps", 1)
    changed = f"has {before} × 1 × 4 samples in a step (ranks × batches × batch size), and this run has "
    assert f"{changed}{after} × {count} × {size}:" in results[0].output
    assert f"({4 * before * steps} samples of this epoch are done)" in results[0].output
    assert "repeated" not in results[0].output
    assert _samples(job) == Counter(set(_samples(job))), "each once"
    assert len(_samples(job)) == 44
    end = seen(job.folder)["end-0.json"]
    assert end["steps"] == steps + math.ceil((44 - 4 * before * steps) / (size * count * after))
    assert end["epoch"] == 1


def test_other_ranks_are_stopped_too(job: HfJob) -> None:
    """From the takeover on, resuming is exact again, and later epochs have all their steps."""
    job = replace(job, samples=44)
    stopped(job, *told(3))
    there = Path(job.folder).rename(job.folder + "-1")
    again = replace(job, folder=job.folder + "-2")
    shutil.copytree(there, job.folder)
    shutil.copytree(there, again.folder)
    stopped(job, *told(2, rank=1), ranks=2)
    found = train_to_end(job, 2)
    assert found["end-0.json"]["steps"] == 3 + 4 + 6
    assert found == train_to_end(again, 2)


def test_other_batches_that_one_rank_reads(tmp_path: Path) -> None:
    """Ranks that read nothing are at the same position."""
    job = HfJob(str(tmp_path / "job"), samples=48).but(accelerator_config={"dispatch_batches": True})
    stopped(job, *told(3, rank=1), ranks=2)
    found = train_to_end(job.but(per_device_train_batch_size=2), 2)
    assert found["end-0.json"]["steps"] == 3 + 6 + 12
    assert found["end-0.json"]["weights"] == found["end-1.json"]["weights"]


@pytest.mark.parametrize(
    "more", [{"accelerator_config": {"use_seedable_sampler": False}}, {"train_sampling_strategy": "group_by_length"}]
)
def test_an_order_that_is_drawn(tmp_path: Path, more: dict[str, Any]) -> None:
    """At the beginning of the pass, and not again at its middle."""
    job = HfJob(str(tmp_path / "job"), samples=44).but(num_train_epochs=1, gradient_accumulation_steps=2, **more)
    stopped(job, *told(3))
    train_to_end(job.but(per_device_train_batch_size=8, gradient_accumulation_steps=1))
    assert _samples(job) == Counter(set(_samples(job)))
    assert len(_samples(job)) == 44


def test_an_order_of_one_process_alone(job: HfJob) -> None:
    job = job.but(num_train_epochs=1, accelerator_config={"use_seedable_sampler": False})
    stopped(job, *told(3))
    results = attempt(job, ranks=2)
    assert all(result.ok for result in results), str(results[0])
    assert (
        "a single process orders samples differently from several: some samples of this epoch are repeated"
        in results[0].output
    )


def test_other_batches_at_the_end_of_an_epoch(tmp_path: Path) -> None:
    """Stopped in the evaluation after it."""
    job = HfJob(str(tmp_path / "job"), samples=44).but(per_device_train_batch_size=8)
    stopped(job, *told(1, "prediction"))
    found = train_to_end(job.but(per_device_train_batch_size=4))["end-0.json"]
    assert (found["steps"], found["epoch"]) == (6 + 11, 2)


def test_other_batches_and_a_limit(tmp_path: Path) -> None:
    """12 steps may need more epochs than before."""
    job = HfJob(str(tmp_path / "job"), samples=48).but(per_device_train_batch_size=8, max_steps=12)
    stopped(job, *told(9))
    job = job.but(per_device_train_batch_size=4)
    stopped(job, *told(1))
    assert train_to_end(job)["end-0.json"]["steps"] == 12


def test_a_stream_that_each_rank_reads_in_its_own_way(tmp_path: Path) -> None:
    """With shards of `datasets`, what other ranks read is unknown, and a warning is logged."""
    job = HfJob(str(tmp_path / "job"), trainer="lora", samples=48, stream=True).but(max_steps=8)
    stopped(job, *told(2), ranks=2)
    [result] = attempt(job)
    assert result.ok, str(result)
    assert "some samples may be repeated and others skipped" in result.output


def test_a_stream_on_other_ranks(tmp_path: Path) -> None:
    job = HfJob(str(tmp_path / "job"), samples=44, stream=True).but(max_steps=4)
    stopped(job, *told(1), ranks=2)
    for result in attempt(job, ranks=3):
        assert result.ok, str(result)
    assert _samples(job) == Counter(set(_samples(job)))
    assert len(_samples(job)) == 44


def test_accumulation_on_ranks(job: HfJob) -> None:
    job = job.but(gradient_accumulation_steps=2)
    stopped(job, *told(5, rank=1), ranks=2)
    assert train_to_end(job, 2) == undisturbed(job, 2)


def test_the_best_model_on_ranks(job: HfJob) -> None:
    """The save of the best checkpoint contains a barrier."""
    job = job.but(load_best_model_at_end=True, save_total_limit=1, learning_rate=3e-2, num_train_epochs=3)
    stopped(job, *told(7, rank=1), ranks=2)
    assert train_to_end(job, 2) == undisturbed(job, 2)
