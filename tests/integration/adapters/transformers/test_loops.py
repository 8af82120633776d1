"""Trainers of many kinds stop and resume: accumulation, limits, best models, early stops, several trainings."""

from __future__ import annotations

import io
import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch
from transformers.trainer_callback import ExportableState, TrainerCallback

from reprieve.testing import pause
from tests.support.hf_kit import attempt, checkpoints, stopped, train_to_end, undisturbed, valid
from tests.support.jobs.hf_jobs import Asking, HfJob, seen
from tests.support.jobs.hf_saving_jobs import Looking
from tests.support.jobs.stop_scenario_jobs import told


@pytest.fixture
def job(tmp_path: Path) -> HfJob:
    return HfJob(str(tmp_path / "job"))


def _exact(job: HfJob, *places: tuple[str, int]) -> None:
    for at, nth in places:
        stopped(job, *told(nth, at))
    assert train_to_end(job) == undisturbed(job)


@pytest.mark.parametrize("nth", [1, 5, 15])
def test_accumulation(job: HfJob, nth: int) -> None:
    """15 batches an epoch, 4 to a step: the last step has 3."""
    _exact(job.but(gradient_accumulation_steps=4), ("forward", nth))


@pytest.mark.parametrize("place", [("forward", 22), ("prediction", 1), ("forward", 3)])
def test_a_limit_in_mid_epoch(job: HfJob, place: tuple[str, int]) -> None:
    _exact(job.but(max_steps=22, eval_strategy="steps", eval_steps=11, save_strategy="steps", save_steps=11), place)


def test_twice_in_the_same_evaluation(job: HfJob) -> None:
    _exact(job, ("prediction", 1), ("prediction", 1), ("forward", 3), ("prediction", 1))


def test_many_times(job: HfJob) -> None:
    _exact(
        job.but(eval_strategy="steps", eval_steps=4, save_strategy="steps", save_steps=6),
        ("forward", 3), ("prediction", 1), ("forward", 1), ("forward", 5), ("prediction", 2), ("forward", 1),
    )  # fmt: skip


BEST = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "save_total_limit": 1}


@pytest.mark.parametrize("place", [("forward", 15), ("prediction", 2), ("forward", 18)])
def test_the_best_model(job: HfJob, place: tuple[str, int]) -> None:
    """Also one that retention would have removed, had it not been the best."""
    _exact(job.but(**BEST, learning_rate=3e-2, num_train_epochs=4), place)


def test_the_best_checkpoint_is_one_that_the_script_saves(job: HfJob) -> None:
    """The script evaluates the best step and does not save it: that `every` saves each 7 steps does not count."""
    job = job.but(metric_for_best_model="loss", eval_strategy="steps", eval_steps=7, learning_rate=0.3)
    end = undisturbed(job)["end-0.json"]
    assert end["best"] is None and end["best_metric"] is not None
    _exact(replace(job, options=(("every", 7),)), ("forward", 7), ("forward", 7))


@pytest.mark.parametrize("place", [("forward", 7), ("prediction", 4), ("prediction", 6)])
def test_stopping_early(job: HfJob, place: tuple[str, int]) -> None:
    often = {"eval_strategy": "steps", "eval_steps": 3, "save_strategy": "steps", "save_steps": 3}
    _exact(replace(job, patience=2).but(**BEST, **often, learning_rate=3e-3), place)


def test_a_schedule_that_looks_at_evaluations(job: HfJob) -> None:
    often = {"eval_strategy": "steps", "eval_steps": 3, "lr_scheduler_type": "reduce_lr_on_plateau"}
    _exact(
        job.but(**BEST | {"save_strategy": "steps", "save_steps": 3}, **often, learning_rate=3e-2), ("prediction", 3)
    )


def test_an_evaluation_at_the_start(job: HfJob) -> None:
    """It stops where it is, and does not run again once a step was trained."""
    job = job.but(eval_on_start=True)
    assert "nothing to save" in stopped(job, *told(2, "prediction"))
    assert checkpoints(job) == []
    _exact(job, ("prediction", 3), ("forward", 2))


def test_an_optimizer_that_swaps_weights(job: HfJob) -> None:
    _exact(replace(job, swapping=True), ("prediction", 1), ("forward", 4))


def test_an_optimizer_without_a_schedule(job: HfJob) -> None:
    """It evaluates other weights than it trains."""
    _exact(
        job.but(optim="schedule_free_adamw", lr_scheduler_type="constant"),
        ("forward", 3), ("prediction", 1), ("forward", 4),
    )  # fmt: skip


def test_a_loss_that_is_scaled(job: HfJob) -> None:
    job = replace(job.but(max_grad_norm=0), scaling=True)
    _exact(job, ("forward", 2), ("forward", 3), ("prediction", 1), ("forward", 4))
    found = seen(job.folder)["end-0.json"]
    assert found["scale"] != 2.0**127
    assert {"scaler.pt"} < {path.name for path in (job.output / "checkpoint-30").iterdir()}


def test_data_that_nobody_wants_to_wait_for(job: HfJob) -> None:
    """Seeking makes it unnecessary."""
    stopped(job.but(ignore_data_skip=True), *told(4))
    assert train_to_end(job.but(ignore_data_skip=True)) == undisturbed(job)


def test_a_finished_job_trains_no_more(job: HfJob) -> None:
    job = job.but(**BEST)
    expected = train_to_end(job)
    assert train_to_end(job) == expected
    assert train_to_end(job) == undisturbed(job)


def test_a_finished_job_goes_on_when_more_is_asked_for(job: HfJob) -> None:
    train_to_end(job)
    more = job.but(num_train_epochs=3)
    train_to_end(more)
    assert seen(job.folder)["end-0.json"]["steps"] == 45


@pytest.mark.parametrize(
    ("first", "more"),
    [(6, {}), (15, {}), (3, {"gradient_accumulation_steps": 4}), (20, {"dataloader_num_workers": 2})],
    ids=["mid-epoch", "end of an epoch", "accumulation", "second epoch"],
)
def test_more_steps_continue_in_the_epoch_that_the_last_one_left(job: HfJob, first: int, more: dict[str, Any]) -> None:
    """The schedule does not depend on the number of steps. Callbacks have seen one more end of an epoch."""
    job = job.but(lr_scheduler_type="constant", eval_strategy="no", save_strategy="no", **more)
    train_to_end(job.but(max_steps=first))

    def without_counts(training: dict[str, Any]) -> dict[str, Any]:
        end = training["end-0.json"]
        log = [{name: entry[name] for name in entry.keys() - {"counted"}} for entry in end["log"]]
        return {**training, "end-0.json": {**end, "log": log}}

    more_steps = job.but(max_steps=22)
    assert without_counts(train_to_end(more_steps)) == without_counts(undisturbed(more_steps))


@pytest.mark.parametrize("nth", [4, 34])
def test_two_trainings_in_a_script(job: HfJob, nth: int) -> None:
    """30 steps each; the second continues with the model of the first, and resumes from its own checkpoints."""
    _exact(replace(job, trainings=2), ("forward", nth))


def test_checkpoints_by_time(job: HfJob) -> None:
    """The fifth step alone takes longer."""
    job = replace(job.but(save_strategy="no"), options=(("every", "1s"),))
    assert attempt(job, pause(0, "forward", 1.2, nth=5))[0].ok
    assert "checkpoint-5" in checkpoints(job)
    assert seen(job.folder) == undisturbed(job.but(save_strategy="no"))


def test_checkpoints_by_our_own_schedule(job: HfJob) -> None:
    job = replace(job.but(save_strategy="no"), options=(("every", 7), ("keep", 2)))
    train_to_end(job)
    assert checkpoints(job) == ["checkpoint-28", "checkpoint-30"]


def test_our_schedule_removes_nothing_that_the_script_asked_for(job: HfJob) -> None:
    """With save_steps and without save_total_limit, stock keeps all. `keep`, 3 by default, limits only the checkpoints
    of `every` and of stops. Another process than the one that saved removes them."""
    job = job.but(save_strategy="steps", save_steps=10)
    stopped(job, *told(12))
    scheduled = replace(job, options=(("every", 4),))
    stopped(scheduled, *told(11))
    train_to_end(scheduled)
    assert sorted(valid(job)) == [10, 20, 23, 24, 28, 30]


def test_our_schedule_with_a_limit_of_the_script(job: HfJob) -> None:
    train_to_end(replace(job.but(save_strategy="steps", save_steps=10, save_total_limit=2), options=(("every", 4),)))
    assert valid(job) == [30, 28]


def test_the_best_counts_towards_the_limit_of_the_script(job: HfJob) -> None:
    job = job.but(**{**BEST, "save_total_limit": 2}, save_strategy="steps", save_steps=5, eval_strategy="steps")
    job = job.but(eval_steps=5, learning_rate=0.3)  # the first is the best
    train_to_end(job)
    best = int(seen(job.folder)["end-0.json"]["best"].rpartition("-")[2])
    assert best < 25
    assert valid(job) == [30, best]


def test_what_a_callback_remembers_as_an_argument(job: HfJob) -> None:
    job = replace(job, callbacks=(Remembering(),))
    stopped(job, *told(9))
    assert train_to_end(job) == undisturbed(job)


class Remembering(TrainerCallback, ExportableState):
    """A callback with its state in constructor arguments, as averages of weights have it. It logs the state."""

    def __init__(self, total: float = 0.0) -> None:
        self.total = total

    def on_step_end(self, args: Any, state: Any, *more: Any, **kwargs: Any) -> None:
        self.total = self.total * 0.9 + state.global_step

    def on_log(self, args: Any, state: Any, *more: Any, **kwargs: Any) -> None:
        state.log_history[-1]["total"] = self.total

    def state(self) -> dict[str, Any]:
        return {"args": {"total": self.total}, "attributes": {}}


def test_what_others_removed_of_a_limit(job: HfJob) -> None:
    train_to_end(job.but(save_strategy="steps", save_steps=5, save_total_limit=2))
    assert checkpoints(job) == ["checkpoint-25", "checkpoint-30"]


def test_the_scripts_present_save_steps_apply(job: HfJob) -> None:
    """A stock resume would follow the checkpoint."""
    stopped(job.but(save_strategy="steps", save_steps=20), *told(4))
    train_to_end(job.but(save_strategy="steps", save_steps=12))
    assert checkpoints(job) == ["checkpoint-12", "checkpoint-24", "checkpoint-30", "checkpoint-4"]


def test_transformers_just_in_time_checkpoints_are_replaced(job: HfJob) -> None:
    results = attempt(job.but(enable_jit_checkpoint=True), *told(4), ranks=2)
    assert [result.exit_code for result in results] == [143, 143]
    warnings = [result.output.count("enable_jit_checkpoint=True: Reprieve replaces") for result in results]
    assert warnings == [1, 0]
    assert checkpoints(job) == ["checkpoint-4"]
    assert train_to_end(job, 2) == undisturbed(job, 2)


def test_a_checkpoint_of_stock_transformers(job: HfJob, tmp_path: Path) -> None:
    """Resume as stock does: with the same batches."""
    half = replace(job.but(save_strategy="steps", save_steps=12, max_steps=12), safe=False)
    assert attempt(half)[0].ok
    shutil.copytree(job.folder, tmp_path / "stock")
    assert attempt(replace(job, safe=False, folder=str(tmp_path / "stock"), given=True))[0].ok
    result = attempt(job)[0]
    assert result.ok, str(result)
    assert "was not saved by Reprieve" in result.output
    batches = [
        [(step, samples) for step, _, samples in seen(folder)["losses-0.jsonl"]]
        for folder in (job.folder, tmp_path / "stock")
    ]
    assert batches[0] == batches[1]
    assert len(batches[0]) == 30


def test_stock_transformers_resumes_from_reprieves_checkpoint(job: HfJob) -> None:
    stopped(job, *told(4))
    stock = replace(job, safe=False, given=True)
    assert attempt(stock)[0].ok
    assert seen(job.folder)["end-0.json"]["steps"] == 30


def test_a_batch_size_that_was_found_before(job: HfJob) -> None:
    """Hugging Face starts again with the batch size that fits into memory."""
    stopped(job, *told(4))
    result = attempt(job.but(auto_find_batch_size=True, per_device_train_batch_size=8))[0]
    assert result.ok, str(result)
    assert "no longer bit for bit" not in result.output
    assert seen(job.folder) == undisturbed(job)


def test_starting_over_with_a_script_that_names_the_last_checkpoint(job: HfJob) -> None:
    stopped(job, *told(4))
    (Path(job.folder) / "losses-0.jsonl").unlink()
    again = replace(job, given=str(job.output / "checkpoint-4"), options=(("fresh", True),))
    result = attempt(again)[0]
    assert result.ok, str(result)
    assert "was moved away and is not used" in result.output
    assert seen(job.folder) == undisturbed(job)
    assert (job.output / "previous-1" / "checkpoint-4").is_dir()


def test_a_callback_that_asks_for_the_data(job: HfJob) -> None:
    job = replace(job, callbacks=(Asking(),))
    _exact(job, ("forward", 5), ("forward", 14))


def test_bfloat16(job: HfJob) -> None:
    _exact(job.but(bf16=True), ("forward", 5), ("prediction", 2))


def test_a_compiled_model(job: HfJob) -> None:
    _exact(job.but(torch_compile_backend="aot_eager"), ("forward", 5))


def test_checkpoints_as_the_environment_says(job: HfJob) -> None:
    env = {"CHECKPOINT_STRATEGY": "epoch", "CHECKPOINT_MAX_RETAIN": "2"}
    result = attempt(job.but(save_strategy="no", num_train_epochs=3), **env)[0]
    assert result.ok, str(result)
    assert checkpoints(job) == ["checkpoint-30", "checkpoint-45"]


def test_checkpoints_in_another_folder(job: HfJob, tmp_path: Path) -> None:
    """The best model is loaded from there, and callbacks get that path."""
    elsewhere = tmp_path / "elsewhere"
    best = job.but(**BEST, learning_rate=3e-2, num_train_epochs=4)
    looking = replace(best, callbacks=(Looking(job.folder),))
    for faults, code in ((told(18), 143), (told(2, "prediction"), 143), ((), 0)):
        result = attempt(looking, *faults, CHECKPOINT_URI=str(elsewhere))[0]
        assert result.exit_code == code, str(result)
    assert seen(job.folder) == undisturbed(best)
    looked = [json.loads(line) for line in (Path(job.folder) / "looked.jsonl").read_text().splitlines()]
    assert [each["path"] for each in looked] == [str(elsewhere / f"checkpoint-{step}") for step in (15, 30, 45, 60)]
    assert all(each["best_is_there"] for each in looked)
    assert checkpoints(job) == []
    assert (elsewhere / str(seen(job.folder)["end-0.json"]["best"])).is_dir()


def test_no_checkpoint_at_the_end(job: HfJob) -> None:
    job = replace(job.but(save_strategy="no"), options=(("save_at_end", False),))
    assert train_to_end(job) == undisturbed(job)
    assert checkpoints(job) == []


def test_small_files_do_not_touch_the_disk(tmp_path: Path) -> None:
    """Torch raises RuntimeError on a full disk."""
    from reprieve.adapters.transformers.save.interception import SaveInterceptor

    with SaveInterceptor(tmp_path) as collecting:
        torch.save({"step": 3}, tmp_path / "scheduler.pt")
        torch.save({"other": 4}, tmp_path.parent / f"{tmp_path.name}.pt")
    assert list(tmp_path.iterdir()) == []
    assert torch.load(tmp_path.parent / f"{tmp_path.name}.pt") == {"other": 4}
    (file,) = collecting.files()
    source = file.segments[0].source  # type: ignore[union-attr]
    assert file.name == "scheduler.pt"
    assert torch.load(io.BytesIO(source.data)) == {"step": 3}  # type: ignore[union-attr]


def test_a_file_that_is_saved_and_removed_again_is_left_out(tmp_path: Path) -> None:
    """Transformers does this with ZeRO 3. And nothing is in torch's old format, which DeepSpeed can be set to use."""
    from transformers import trainer

    from reprieve.adapters.transformers.save.interception import SaveInterceptor

    with SaveInterceptor(tmp_path) as collecting:
        for name in ("model.safetensors", "other.safetensors"):
            safetensors.torch.save_file({"weight": torch.ones(3)}, tmp_path / name)
        torch.save(torch.ones(2**20), tmp_path / "states.pt", _use_new_zipfile_serialization=False)
        trainer.remove_dummy_checkpoint(True, str(tmp_path), ["model.safetensors", "pytorch_model.bin"])
    assert [file.name for file in collecting.files()] == ["other.safetensors", "states.pt"]
    assert list(tmp_path.iterdir()) == []


def test_transformers_bar_is_back_after_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """While Reprieve's bar is drawn, log lines are printed above it."""
    from transformers.trainer_callback import CallbackHandler, DefaultFlowCallback, PrinterCallback, ProgressCallback

    from reprieve.adapters.transformers import preflight

    handler: Any = CallbackHandler([DefaultFlowCallback, ProgressCallback], None, None, None, None)
    handler.args = SimpleNamespace(disable_tqdm=False)
    stock_bar = handler.callbacks[1]
    monkeypatch.setattr(preflight, "terminal", lambda: None)
    with preflight.bar_replaced(handler):
        assert handler.callbacks[1] is stock_bar
    monkeypatch.setattr(preflight, "terminal", lambda: "a terminal")
    with preflight.bar_replaced(handler):
        assert [type(each) for each in handler.callbacks] == [DefaultFlowCallback, PrinterCallback]
    assert handler.callbacks[1:] == [stock_bar]
