"""A folder may hold anything, and a script may say anything: a clear word, the right code, and nothing lost."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from .hf_jobs import HfJob, seen
from .hf_kit import attempt, checkpoints, goes_on, stopped, undisturbed
from .stop_scenario_jobs import told

_FOR_A_PERSON = ("StateMismatch", "ConfigError", "NothingToResume")
"""A script that ends with one of these ends with 42."""


@pytest.fixture
def job(tmp_path: Path) -> HfJob:
    return HfJob(str(tmp_path / "job"))


def _refused(job: HfJob, *words: str, ranks: int = 1) -> None:
    before = {path: path.stat().st_mtime_ns for path in job.output.glob("checkpoint-*/*")}
    for result in attempt(job, ranks=ranks):
        assert result.error is not None, str(result)
        assert result.error.type in _FOR_A_PERSON, str(result)
        for word in words:
            assert word in result.error.message, str(result)
    assert {path: path.stat().st_mtime_ns for path in job.output.glob("checkpoint-*/*")} == before


def test_checkpoints_of_another_shape(job: HfJob) -> None:
    stopped(replace(job, model="llama"), *told(3))
    _refused(replace(job, model="wide_llama"), "does not fit this model", "size mismatch")


def test_checkpoints_of_another_model(job: HfJob) -> None:
    stopped(replace(job, model="llama"), *told(3))
    _refused(job, "is of another model", "are missing", "are unknown")


def test_all_checkpoints_are_torn(job: HfJob) -> None:
    stopped(job, *told(3))
    (job.output / "checkpoint-3" / "model.safetensors").write_bytes(b"torn")
    result = attempt(job)[0]
    assert result.error is not None, str(result)
    assert result.error.type == "NothingToResume"
    assert "model.safetensors has 4 bytes" in result.error.message
    assert checkpoints(job) == ["checkpoint-3.set-aside"]


def test_the_newest_checkpoint_is_torn(job: HfJob) -> None:
    often = job.but(save_strategy="steps", save_steps=2)
    stopped(often, *told(7))
    assert checkpoints(job)[-1] == "checkpoint-7"
    whole = (job.output / "checkpoint-7" / "optimizer.pt").read_bytes()
    (job.output / "checkpoint-7" / "optimizer.pt").write_bytes(whole[:1000] + b"x" + whole[1001:])
    results = attempt(often)
    assert results[0].ok, str(results[0])
    assert "optimizer.pt is damaged" in results[0].output
    end = undisturbed(often)["end-0.json"]
    assert seen(job.folder)["end-0.json"] == end


def test_a_folder_that_was_renamed(job: HfJob) -> None:
    often = job.but(save_strategy="steps", save_steps=2)
    stopped(often, *told(5))
    (job.output / "checkpoint-5").rename(job.output / "checkpoint-50")
    results = attempt(often)
    assert results[0].ok, str(results[0])
    assert "checkpoint-50" in results[0].output
    assert seen(job.folder)["end-0.json"] == undisturbed(often)["end-0.json"]


def test_fewer_steps_than_were_done(job: HfJob) -> None:
    stopped(job, *told(12))
    _refused(job.but(max_steps=10), "the checkpoint is of step 12, and there are 10 steps to train")


def test_another_batch_size(job: HfJob) -> None:
    """12 steps of 4 are 48 samples: 6 steps of 8."""
    stopped(job, *told(12))
    half = job.but(per_device_train_batch_size=8)
    result = attempt(half)[0]
    assert result.ok, str(result)
    assert "these are 1 with batches of 8: the run goes on at the same place in the data (48 samples" in result.output


def test_only_the_model_is_saved(job: HfJob) -> None:
    _refused(job.but(save_only_model=True), "save_only_model=True", "save_model() saves the model alone")


def test_a_callback_that_raises_in_a_save(job: HfJob) -> None:
    often = job.but(save_strategy="steps", save_steps=4)
    goes = replace(often, raising=8)
    result = attempt(goes)[0]
    assert result.exit_code == 1, str(result)
    assert "the callback does not want to" in result.output
    assert checkpoints(job) == ["checkpoint-4"]
    assert goes_on(often)["end-0.json"] == undisturbed(often)["end-0.json"]


def test_a_starting_point(job: HfJob, tmp_path: Path) -> None:
    """A path that the script gives is where the run begins, and not where each of its starts does."""
    goes_on(job.but(max_steps=10, save_strategy="steps", save_steps=10))
    shutil.move(job.output / "checkpoint-10", tmp_path / "base")
    shutil.rmtree(job.output)
    given = replace(job, given=str(tmp_path / "base"))
    assert "saved step 15" in stopped(given, *told(5))
    output = attempt(given)[0].output
    assert "the run began at" in output
    assert seen(job.folder)["end-0.json"]["steps"] == 30
    _refused(replace(job, given=str(job.output.parent / "elsewhere")), "of a run that did not")


def test_resume_where_nothing_is(job: HfJob) -> None:
    assert goes_on(replace(job, given=True)) == undisturbed(job)
