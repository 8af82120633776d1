"""Trainers under DeepSpeed: each rank saves its part of the optimizer, and with ZeRO 3 of the model."""

from __future__ import annotations

import importlib
import os
import pickle
import runpy
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from reprieve.adapters.transformers import deepspeed
from reprieve.adapters.transformers.save.interception import SaveInterceptor
from reprieve.checkpoint.checkpointer import Checkpointer
from reprieve.checkpoint.folder.foreign.checker import check_foreign
from reprieve.checkpoint.format.manifest import ARCHIVE_MARK
from reprieve.errors import ConfigError, InvalidCheckpoint
from reprieve.testing import run_ranks, values
from tests.support.hf_kit import after, ends, refused, stopped, train_to_end, undisturbed, valid
from tests.support.jobs.hf_jobs import PRELOAD, HfJob, begin_deepspeed, deepspeed_config
from tests.support.jobs.stop_scenario_jobs import told

MODEL, PART = "mp_rank_00_model_states.pt", "zero_pp_rank_{}_mp_rank_00_{}_states.pt"


@pytest.fixture
def job(tmp_path: Path) -> HfJob:
    """6 steps in each of two epochs, 3 batches in an evaluation."""
    return _job(tmp_path / "job")


def _job(folder: Path) -> HfJob:
    return HfJob(str(folder), samples=48, zero=2).but(per_device_eval_batch_size=2)


@pytest.mark.parametrize("at", [("forward", 4), ("prediction", 2)], ids=lambda at: f"{at[0]}-{at[1]}")
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_stopped_anywhere(job: HfJob, stage: int, at: tuple[str, int]) -> None:
    job = replace(job, zero=stage)
    stopped(job, *told(at[1], at[0], rank=1), ranks=2)
    step = 4 if at[0] == "forward" else 6
    assert valid(job) == [step]
    folder = job.output / f"checkpoint-{step}"
    assert sorted(path.name for path in (folder / f"global_step{step}").iterdir()) == sorted(_FILES[stage])
    assert (folder / "model.safetensors").exists() == (stage != 3), "stock has none of a model in parts"
    assert train_to_end(job, 2) == undisturbed(job, 2)


_OPTIMIZERS = [PART.format(rank, "optim") for rank in (0, 1)]
_FILES = {
    0: [MODEL],
    1: [MODEL, *_OPTIMIZERS],
    2: [MODEL, *_OPTIMIZERS],
    3: [*(PART.format(rank, "model") for rank in (0, 1)), *_OPTIMIZERS],
}


_ON_CPU = deepspeed_config(2, offload_optimizer={"device": "cpu"}) | {"zero_force_ds_cpu_optimizer": False}


@pytest.mark.parametrize(
    ("more", "ranks"),
    [
        ({"zero": 2}, 3),
        ({"zero": 2, "bf16": True, "gradient_accumulation_steps": 4}, 2),
        ({"zero": 3, "bf16": True, "save_strategy": "steps", "save_steps": 2}, 2),
        ({"zero": 2, "load_best_model_at_end": True, "learning_rate": 3e-2, "num_train_epochs": 3}, 2),
        ({"zero": 3, "load_best_model_at_end": True, "learning_rate": 3e-2, "num_train_epochs": 3}, 2),
        ({"zero": 2, "trainer": "lora", "model": "llama"}, 2),
        ({"zero": 3, "trainer": "lora", "model": "llama"}, 2),
        ({"zero": 1}, 1),
        ({"zero": 0, "bf16": True}, 2),
        ({"zero": 2, "deepspeed": _ON_CPU}, 2),
        ({"zero": 1, "bf16": True, "deepspeed": deepspeed_config(1) | {"data_types": {"grad_accum_dtype": "fp32"}}}, 2),
    ],
    ids=lambda value: ", ".join(value) if isinstance(value, dict) else f"{value} ranks",
)
def test_of_every_kind(job: HfJob, more: dict[str, Any], ranks: int) -> None:
    of_job = {name: more.pop(name) for name in ("zero", "trainer", "model") if name in more}
    job = replace(job, **of_job).but(**more)
    stopped(job, *told(8, rank=ranks - 1), ranks=ranks)
    assert train_to_end(job, ranks) == undisturbed(job, ranks)


@pytest.fixture(scope="module", params=[2, 3])
def stock(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> HfJob:
    """A job that resumed from stock's own checkpoint of step 4. No fetch draws random numbers: stock is exact."""
    job = replace(_job(tmp_path_factory.mktemp("stock") / "job"), masking=False, safe=False, zero=request.param)
    ends(job.but(save_strategy="steps", save_steps=4), 2)
    for later in (8, 12):
        shutil.rmtree(job.output / f"checkpoint-{later}")
    ends(replace(job, given=True), 2)
    return job


def test_stock_resumes_from_reprieves_checkpoint(job: HfJob, stock: HfJob) -> None:
    job = replace(job, masking=False, zero=stock.zero)
    stopped(job, *told(4), ranks=2)
    if stock.zero == 2:
        reprieve, others = (load_file(each.output / "checkpoint-4" / "model.safetensors") for each in (job, stock))
        assert others.keys() - reprieve.keys() == {"lm_head.weight"}, "tied, and written twice by stock"
        assert all(torch.equal(reprieve[name], others[name]) for name in reprieve)
    ends(replace(job, safe=False, given=True), 2)
    assert after(job, 4) == after(stock, 4)


def test_deepspeeds_script_reads_reprieves_checkpoint(job: HfJob, stock: HfJob, tmp_path: Path) -> None:
    """The script that DeepSpeed puts into each checkpoint extracts all weights, also partitioned ones."""
    job = replace(job, masking=False, zero=stock.zero)
    stopped(job, *told(4), ranks=2)
    found = []
    for each in (job, stock):
        folder, weights = each.output / "checkpoint-4", tmp_path / f"weights-{len(found)}"
        values(run_ranks(1, _extract_weights, str(folder), str(weights), backend=None, modules=PRELOAD))
        found.append(torch.load(weights / "pytorch_model.bin", weights_only=True))
    reprieve, others = found
    assert reprieve.keys() == others.keys()
    assert all(torch.equal(reprieve[name], others[name]) for name in others)


def _extract_weights(folder: str, weights: str) -> None:
    """Run the script that is in the checkpoint, in a fork: importing DeepSpeed takes longer."""
    os.chdir(folder)
    sys.argv = ["zero_to_fp32.py", ".", weights]
    runpy.run_path("zero_to_fp32.py", run_name="__main__")


def test_goes_on_from_stock(job: HfJob, stock: HfJob) -> None:
    job = replace(job, masking=False, zero=stock.zero)
    shutil.copytree(stock.output / "checkpoint-4", job.output / "checkpoint-4")
    assert "was not saved by Reprieve" in ends(job, 2)
    assert after(job, 4) == after(stock, 4)


def test_a_torn_one_of_stock(stock: HfJob, tmp_path: Path) -> None:
    """It is detected, whichever file is missing."""
    whole = tmp_path / "checkpoint-4"
    shutil.copytree(stock.output / "checkpoint-4", whole)
    check_foreign(whole)
    for missing, reason in (
        ("latest", "latest is missing"),
        (f"global_step4/{PART.format(1, 'optim')}", "1 parts of the optimizer, and 2 ranks saved it"),
        (f"global_step4/{MODEL if stock.zero == 2 else PART.format(0, 'model')}", "model"),
    ):
        (whole / missing).rename(tmp_path / "aside")
        with pytest.raises(InvalidCheckpoint, match=reason):
            check_foreign(whole)
        (tmp_path / "aside").rename(whole / missing)


class _Runs:
    """No reader unpickles it."""

    def __reduce__(self) -> Any:
        return print, ("it ran",)


def test_no_code_of_a_checkpoint_runs(stock: HfJob, tmp_path: Path) -> None:
    """Stock DeepSpeed would run the code."""
    folder = tmp_path / "checkpoint-4"
    shutil.copytree(stock.output / "checkpoint-4", folder)
    file = folder / "global_step4" / PART.format(0, "optim")
    torch.save({"optimizer_state_dict": _Runs()}, file)
    with pytest.raises(InvalidCheckpoint, match="not trusted: loading it would run"):
        check_foreign(folder)
    with pytest.raises(pickle.UnpicklingError):
        deepspeed._read(torch.load, SimpleNamespace(), folder, str(file), weights_only=False)


def test_weights_are_not_copied(tmp_path: Path) -> None:
    """They are views of one tensor, and each is saved alone."""
    from deepspeed.checkpoint import utils

    whole = torch.arange(8.0)
    others = {"turned": torch.ones(2, 3).t(), "counts": torch.arange(3)}
    parts = {"a": whole[:4], "b": whole[4:], **others, "extra": {"step": 3}}
    with SaveInterceptor(tmp_path):
        taken = utils.clone_tensors_for_torch_save(parts)
    for name in ("a", "b"):
        assert taken[name].data_ptr() == parts[name].data_ptr()
        assert taken[name].untyped_storage().nbytes() == 16
    for name, value in others.items():
        assert taken[name].data_ptr() != value.data_ptr()
        assert torch.equal(taken[name], value)
    assert taken["extra"] == {"step": 3}
    assert utils.clone_tensors_for_torch_save(parts)["a"].data_ptr() != parts["a"].data_ptr()


def test_large_files_are_written_by_us(job: HfJob) -> None:
    """Torch does not copy them a second time."""
    stopped(replace(job, model="wide_gpt2"), *told(2), ranks=2)
    for path in (job.output / "checkpoint-2" / "global_step2").iterdir():
        assert path.read_bytes().rfind(ARCHIVE_MARK, -200) > 0, path


@pytest.mark.parametrize("stage", [2, 3])
def test_another_model(job: HfJob, stage: int) -> None:
    job = replace(job, zero=stage)
    stopped(replace(job, model="llama"), *told(3), ranks=2)
    refused(replace(job, model="wide_llama"), "does not fit this model", "size mismatch", ranks=2)
    refused(job, "was saved from another model", "are missing", "are unknown", ranks=2)


@pytest.mark.parametrize(("stage", "after", "word"), [(0, "qo", "are missing"), (2, "o", "are unknown")])
def test_an_adapter_of_other_modules(job: HfJob, stage: int, after: str, word: str) -> None:
    """They have the same shapes: stock DeepSpeed would mix the optimizer of one with the weights of the other."""
    job = replace(job, model="llama", zero=stage)
    stopped(replace(job, trainer="lora_q"), *told(3), ranks=2)
    refused(replace(job, trainer=f"lora_{after}"), "was saved from another model", word, "_proj.lora_A", ranks=2)


def test_another_partition_is_refused(job: HfJob) -> None:
    """DeepSpeed cannot resume from there, and does not always report it."""
    stopped(job, *told(3), ranks=2)
    refused(
        job, "holds the optimizer in 2 parts, for as many ranks, and this run has 3", "Resume with 2 ranks", ranks=3
    )
    (Path(job.folder) / "losses-2.jsonl").unlink()
    refused(replace(job, zero=3), "was saved with ZeRO stage 1 or 2, and this run has ZeRO stage 3", ranks=2)
    refused(replace(job, zero=0), "was saved with ZeRO stage 1 or 2, and this run has DeepSpeed without ZeRO", ranks=2)
    refused(job.but(bf16=True), "was saved with other DeepSpeed settings (another precision?)", ranks=2)
    assert train_to_end(replace(job, zero=1), 2) == undisturbed(job, 2), "stages 1 and 2 partition alike"


@pytest.mark.parametrize(
    ("config", "word"),
    [
        ({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme"}}}, 'offload to "cpu"'),
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}, 'offload to "cpu"'),
        ({"checkpoint": {"writer": {"type": "fast"}}}, "names a checkpoint writer"),
        ({"datastates_ckpt": {"host_cache_size": 1}}, "names a checkpoint writer"),
    ],
)
def test_settings_that_write_state_elsewhere_are_refused(config: dict[str, Any], word: str) -> None:
    plugin = SimpleNamespace(deepspeed_config=config)
    trainer = SimpleNamespace(accelerator=SimpleNamespace(state=SimpleNamespace(deepspeed_plugin=plugin)))
    with pytest.raises(ConfigError, match=word):
        deepspeed.check(trainer)


def _loop(folder: str, given: str) -> None:
    """Use DeepSpeed in a plain loop."""
    begin_deepspeed()
    model = torch.nn.Linear(4, 4)
    settings = {"train_batch_size": 4, "zero_allow_untested_optimizer": True, "zero_optimization": {"stage": 3}}
    engine, optimizer, *_ = importlib.import_module("deepspeed").initialize(
        model=model, optimizer=torch.optim.AdamW(model.parameters()), config=settings
    )
    Checkpointer(folder, **{given: {"engine": engine, "model": model, "optimizer": optimizer}[given]})


@pytest.mark.parametrize("given", ["engine", "model", "optimizer"])
def test_a_plain_loop_is_refused(tmp_path: Path, given: str) -> None:
    """Its checkpoints would be incomplete."""
    [result] = run_ranks(1, _loop, str(tmp_path), given, backend="gloo", modules=PRELOAD)
    assert result.error is not None, str(result)
    assert result.error.type == "ConfigError", str(result)
    assert f"{given} is DeepSpeed's, which saves and loads its state itself" in result.error.message


def test_all_gathered_on_a_rank(job: HfJob) -> None:
    """Resuming is as exact, and the cost is logged."""
    job = replace(job, zero=3)
    full = job.but(deepspeed=deepspeed_config(3, stage3_gather_16bit_weights_on_model_save=True))
    assert "gathers the whole model (" in stopped(full, *told(4, rank=1), ranks=2)
    assert (job.output / "checkpoint-4" / "model.safetensors").exists()
    assert train_to_end(full, 2) == undisturbed(job, 2)
