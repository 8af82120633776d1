"""Callbacks, pushes to the Hub and TRL's model cards find a checkpoint committed as soon as it is saved."""

from __future__ import annotations

import errno
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from reprieve.checkpoint.buffers.block_pool import BlockPool
from reprieve.checkpoint.folder.verify import verify
from reprieve.testing import Result, fail, pause, terminate
from tests.support.hf_kit import attempt, checkpoints
from tests.support.jobs.hf_jobs import HfJob
from tests.support.jobs.hf_saving_jobs import Hub, Judging, Looking, digests, train_and_push
from tests.support.jobs.stop_scenario_jobs import told

OFTEN = {"max_steps": 9, "eval_strategy": "steps", "eval_steps": 3, "save_strategy": "steps", "save_steps": 3}
BEST = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "learning_rate": 3e-3}
PUSHED = {"push_to_hub": True, "hub_strategy": "all_checkpoints", "hub_always_push": True, "hub_token": "none"}


@pytest.fixture
def job(tmp_path: Path) -> HfJob:
    return HfJob(str(tmp_path / "job")).but(**OFTEN)


@pytest.fixture
def hub() -> Iterator[Callable[..., Hub]]:
    """A function that makes a Hub."""
    hubs: list[Hub] = []

    def make(*args: Any) -> Hub:
        hubs.append(Hub(*args))
        return hubs[-1]

    yield make
    for hub in hubs:
        hub.close()


def _run(job: HfJob, *args: Any, code: int = 0, **more: Any) -> Result:
    """Import once what all attempts need."""
    result = attempt(job, *args, **more)[0]
    assert result.exit_code == code, str(result)
    return result


def _looked(job: HfJob) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(job.folder) / "looked.jsonl").read_text().splitlines()]


def _check(path: Path) -> None:
    verify(path, BlockPool(limit=2))


@pytest.mark.parametrize("greater_is_better", [False, True])
def test_a_callback_finds_it_committed(job: HfJob, greater_is_better: bool) -> None:
    """Stopped between two saves, and in the evaluation before one."""
    looking = replace(job.but(**BEST, greater_is_better=greater_is_better), callbacks=(Looking(job.folder),))
    _run(looking, *told(5), code=143)
    _run(looking, *told(1, "prediction"), code=143)
    _run(looking)
    looked = _looked(job)
    assert [each["step"] for each in looked] == [3, 6, 9]
    assert all(each["best_is_there"] for each in looked)
    saved = {path.name: json.loads((path / "trainer_state.json").read_text()) for path in job.output.glob("c*")}
    log = saved["checkpoint-9"]["log_history"]
    losses = [(entry["eval_loss"], entry["step"]) for entry in log if "eval_loss" in entry]
    assert [step for _, step in losses] == [3, 6, 9]

    def best(step: int) -> str:
        so_far = [loss for loss in losses if loss[1] <= step]
        return str(job.output / f"checkpoint-{(max if greater_is_better else min)(so_far)[1]}")

    assert [each["trainers_best"] for each in looked] == [best(3), best(6), best(9)]
    assert [each["best"] for each in looked] == [best(3), best(6), best(9)]
    assert {name: state["best_model_checkpoint"] for name, state in saved.items()} == {
        "checkpoint-3": best(3),
        "checkpoint-5": best(3),
        "checkpoint-6": best(6),
        "checkpoint-9": best(9),
    }


def test_a_callback_that_raises(job: HfJob) -> None:
    result = _run(replace(job, callbacks=(Looking(job.folder, raising=6),)), code=1)
    assert result.error is not None
    assert (result.error.type, result.error.message) == ("LookupError", "the callback does not like it")
    assert checkpoints(job) == ["checkpoint-3", "checkpoint-6"]
    for record in _looked(job):
        path = job.output / f"checkpoint-{record['step']}"
        _check(path)
        assert digests(path) == record["files"]
    _run(replace(job, callbacks=(Looking(job.folder),)))
    assert [each["step"] for each in _looked(job)] == [3, 6, 9]


def test_a_callback_of_the_second_training_finds_its_own(job: HfJob) -> None:
    _run(replace(job, trainings=2, callbacks=(Looking(job.folder),)))
    folders = [job.output] * 3 + [job.output / "train-2"] * 3
    assert [each["path"] for each in _looked(job)] == [
        str(folder / f"checkpoint-{step}") for folder, step in zip(folders, [3, 6, 9] * 2, strict=True)
    ]


def test_a_callback_is_not_shown_what_storage_refused(job: HfJob) -> None:
    failing = fail(0, "before commit", OSError(errno.EIO, "Input/output error"))
    result = _run(replace(job, callbacks=(Looking(job.folder),)), failing)
    assert "step 3 is not saved" in result.output
    assert [each["step"] for each in _looked(job)] == [6, 9]


@pytest.mark.parametrize("background", [False, True])
def test_the_best_is_one_that_is_there(job: HfJob, background: bool) -> None:
    """The save of the best step fails, at once or in the background: the best earlier checkpoint is loaded."""
    judging = Judging({3: 2.0, 6: 1.0, 8: 3.0})
    callbacks = (judging,) if background else (judging, Looking(job.folder))
    best = replace(job.but(**BEST, greater_is_better=False, save_total_limit=1, max_steps=8), callbacks=callbacks)
    result = _run(best, fail(0, "before commit", OSError(errno.EIO, "Input/output error"), nth=2))
    assert ("the periodic save before this one failed" if background else "step 6 is not saved") in result.output
    assert "Could not locate the best model" not in result.output
    end = json.loads((Path(job.folder) / "end-0.json").read_text())
    assert end["best"] == "checkpoint-3"
    assert checkpoints(job) == ["checkpoint-3", "checkpoint-8"]


def test_a_push_is_of_what_is_committed(job: HfJob, hub: Callable[..., Hub]) -> None:
    """Also one that was due at the stop; and none of Reprieve's files are uploaded."""

    def look(paths: list[str]) -> None:
        if paths[0].startswith("checkpoint-"):
            _check(job.output / paths[0].split("/")[0])

    there = hub(look)
    pushing = {"fn": train_and_push, "args": (there.url,)}
    _run(job.but(**PUSHED), *told(1, "prediction"), code=143, **pushing)
    assert there.begun == []
    assert checkpoints(job) == ["checkpoint-3"]
    _run(job.but(**PUSHED), **pushing)
    folders = [next(iter(upload)).split("/")[0] for upload in there.uploads]
    assert [folder for folder in folders if folder.startswith("checkpoint-")] == [
        "checkpoint-3", "checkpoint-6", "checkpoint-9",
    ]  # fmt: skip
    assert len(there.uploads) == 7, "with each of them the model, and once more at the end"
    for upload in there.uploads:
        if next(iter(upload)).startswith("checkpoint-"):
            assert upload == {path: (job.output / path).read_bytes() for path in upload}
            folder = next(iter(upload)).split("/")[0]
            assert len(upload) == len(list((job.output / folder).iterdir()))
        else:
            assert {"model.safetensors", "config.json"} <= upload.keys()
            assert not [path for path in upload if path.startswith(".") or "checkpoint-" in path]


def test_what_was_left_behind_is_not_pushed(job: HfJob, hub: Callable[..., Hub]) -> None:
    _run(job, *told(5), code=143)
    there = hub()
    _run(job.but(**PUSHED), fn=train_and_push, args=(there.url,), CHECKPOINT_RESUME="false")
    assert (job.output / "previous-1" / "checkpoint-5").is_dir()
    assert len(there.uploads) == 7
    assert not [path for upload in there.uploads for path in upload if path.startswith("previous")]


def test_a_stop_during_a_save_that_would_be_pushed(job: HfJob, hub: Callable[..., Hub]) -> None:
    there = hub()
    faults = (terminate(0, "before commit"), pause(0, "before commit", 0.2))
    _run(job.but(**PUSHED), *faults, code=143, fn=train_and_push, args=(there.url,))
    assert checkpoints(job) == ["checkpoint-3"]
    assert there.begun == []


def test_a_stop_of_which_nobody_knows_the_deadline(job: HfJob, hub: Callable[..., Hub]) -> None:
    there = hub()
    _run(job.but(**PUSHED), *told(2), code=143, fn=train_and_push, args=(there.url,), REPRIEVE_GRACE="")
    assert checkpoints(job) == ["checkpoint-2"]
    assert there.begun == []


def test_a_stop_during_a_push(job: HfJob, hub: Callable[..., Hub]) -> None:
    """The upload of the model is in progress until the process has ended, and that of the checkpoint is queued."""
    ended = threading.Event()
    there = hub(lambda paths: ended.wait(120))
    _run(job.but(**PUSHED), *told(5), code=143, fn=train_and_push, args=(there.url,))
    ended.set()
    assert checkpoints(job) == ["checkpoint-3", "checkpoint-5"]
    assert len(there.begun) == 1
    assert "model.safetensors" in there.begun[0]


def test_a_model_card_is_named_after_the_output(job: HfJob) -> None:
    _run(replace(job, trainer="packed", samples=80), *told(4), code=143)
    card = (job.output / "README.md").read_text()
    assert "# Model Card for out\n" in card
    assert "model_name: out\n" in card
    assert "checkpoint-" not in card
