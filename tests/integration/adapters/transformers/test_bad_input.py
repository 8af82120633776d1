"""Bad checkpoints and bad arguments: a clear message, the right exit code, and nothing lost."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from reprieve.adapters.transformers.preflight import check
from reprieve.errors import ConfigError
from tests.support.hf_kit import attempt, checkpoints, ends, refused, stopped, train_to_end, undisturbed
from tests.support.jobs.hf_jobs import HfJob, seen
from tests.support.jobs.stop_scenario_jobs import told
from tests.support.places import HIDE_OPTIONAL

SOAK = bool(os.environ.get("REPRIEVE_SOAK"))


@pytest.fixture
def job(tmp_path: Path) -> HfJob:
    return HfJob(str(tmp_path / "job"))


def test_ranks_of_which_the_trainer_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU and without use_cpu=True, transformers trains in each of torchrun's processes alone."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"2 processes were started.*use_cpu=True"):
        check(SimpleNamespace(args=SimpleNamespace(world_size=1)))


def test_checkpoints_of_another_shape(job: HfJob) -> None:
    stopped(replace(job, model="llama"), *told(3))
    refused(replace(job, model="wide_llama"), "does not fit this model", "size mismatch")


def test_checkpoints_of_another_model(job: HfJob) -> None:
    stopped(replace(job, model="llama"), *told(3))
    refused(job, "was saved from another model", "are missing", "are unknown")


@pytest.mark.parametrize(
    ("before", "after", "word"),
    [("q", "o", "4 weights are unknown"), ("q", "qo", "are missing"), ("qo", "q", "are unknown")],
)
def test_an_adapter_of_other_modules(job: HfJob, before: str, after: str, word: str) -> None:
    """PEFT loads what fits, and the trainer does not check whether that was all."""
    job = replace(job, model="llama")
    stopped(replace(job, trainer=f"lora_{before}"), *told(3))
    refused(replace(job, trainer=f"lora_{after}"), "was saved from another model", word, "_proj.lora_A")


def test_all_checkpoints_are_torn(job: HfJob) -> None:
    stopped(job, *told(3))
    (job.output / "checkpoint-3" / "model.safetensors").write_bytes(b"torn")
    result = attempt(job)[0]
    assert result.error is not None, str(result)
    assert result.error.type == "NoValidCheckpoint"
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
    whole_run = undisturbed(often)
    assert seen(job.folder)["end-0.json"] == whole_run["end-0.json"]
    assert len(seen(job.folder)["losses-0.jsonl"]) == len(whole_run["losses-0.jsonl"]) + 1, "from step 6 on"


def test_a_folder_that_was_renamed(job: HfJob) -> None:
    often = job.but(save_strategy="steps", save_steps=2)
    stopped(often, *told(5))
    (job.output / "checkpoint-5").rename(job.output / "checkpoint-50")
    results = attempt(often)
    assert results[0].ok, str(results[0])
    assert "checkpoint-50" in results[0].output
    whole_run = undisturbed(often)
    assert seen(job.folder)["end-0.json"] == whole_run["end-0.json"]
    assert len(seen(job.folder)["losses-0.jsonl"]) == len(whole_run["losses-0.jsonl"]) + 1, "from step 4 on"


def test_fewer_steps_than_were_done(job: HfJob) -> None:
    stopped(job, *told(12))
    refused(job.but(max_steps=10), "the checkpoint is of step 12, but there are only 10 steps to train")


def test_already_finished_is_logged_only_where_it_is_true(job: HfJob) -> None:
    """Not before a refusal, since fewer steps are requested now; not where more are, and training resumes."""
    finished = "already finished after"
    assert finished not in ends(job.but(max_steps=6))
    assert f"{finished} 6 steps: nothing to train" in ends(job.but(max_steps=6))
    fewer = attempt(job.but(max_steps=4))[0]
    assert fewer.error is not None and fewer.error.type == "StateMismatch", str(fewer)
    assert finished not in fewer.output
    assert finished not in ends(job.but(max_steps=8))


def test_another_batch_size(job: HfJob) -> None:
    """12 steps of 4 are 48 samples: 6 steps of 8."""
    stopped(job, *told(12))
    half = job.but(per_device_train_batch_size=8)
    result = attempt(half)[0]
    assert result.ok, str(result)
    assert "this run has 1 × 1 × 8: it resumes at the same position in the data (48 samples" in result.output


def test_another_batch_size_of_samples_that_are_grouped(job: HfJob) -> None:
    job = job.but(train_sampling_strategy="group_by_length", num_train_epochs=1)
    stopped(job, *told(2))
    result = attempt(job.but(per_device_train_batch_size=8))[0]
    assert result.ok, str(result)
    assert "samples grouped by length come in another order in steps of this size" in result.output


@pytest.mark.parametrize(("before", "after", "steps"), [(1, 2, 22), (2, 1, 24)])
def test_another_accumulation(job: HfJob, before: int, after: int, steps: int) -> None:
    """12 of 30 batches are done, in 12 or in 6 steps: 18 remain."""
    stopped(job.but(gradient_accumulation_steps=before), *told(12))
    result = attempt(job.but(gradient_accumulation_steps=after))[0]
    assert result.ok, str(result)
    assert (
        f"has 1 × {before} × 4 samples in a step (ranks × batches × batch size), and this run has 1 × {after} × 4:"
        in result.output
    )
    found = seen(job.folder)
    assert found["end-0.json"]["steps"] == steps
    batches = [samples for _, _, samples in found["losses-0.jsonl"]]
    assert len(batches) == 30
    for epoch in (batches[:15], batches[15:]):
        assert len({sample for samples in epoch for sample in samples}) == 60


def test_only_the_model_is_saved(job: HfJob) -> None:
    refused(job.but(save_only_model=True), "save_only_model=True", "save_model() saves the model alone")


def _script(folder: Path, *command: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a command under the launcher, which may restart it."""
    (folder / "train.py").write_text(_SCRIPT)
    env = {"HF_HUB_OFFLINE": "1", **HIDE_OPTIONAL, **env}
    env = {**os.environ, "REPRIEVE_STATE_DIR": str(folder / "state"), **env}
    launcher = [sys.executable, "-m", "reprieve", "run", "--max-restarts", "3"]
    return subprocess.run([*launcher, *command], env=env, cwd=folder, capture_output=True, text=True, timeout=120)


_PYTHON = (sys.executable, "train.py")
_TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "train.py")


def test_what_is_refused_before_anything_begins_ends_with_42(tmp_path: Path) -> None:
    ended = _script(tmp_path, *_PYTHON, ONLY_MODEL="1")
    assert ended.returncode == 42, ended.stderr
    assert ended.stderr.count("save_model() saves the model alone") >= 1
    assert "permanent failure, restarting will not help: ConfigError: save_only_model=True" in ended.stderr


def test_what_is_refused_when_it_resumes_ends_with_42(tmp_path: Path) -> None:
    """Another model, on two ranks; then nothing but a torn checkpoint."""
    ended = _script(tmp_path, *_PYTHON)
    assert ended.returncode == 0, ended.stderr
    ended = _script(tmp_path, *_TORCHRUN, WIDTH="16")
    assert ended.returncode == 42, ended.stderr
    assert "permanent failure, restarting will not help: StateMismatch:" in ended.stderr
    [checkpoint] = (tmp_path / "out").glob("checkpoint-*")
    (checkpoint / "model.safetensors").write_bytes(b"torn")
    ended = _script(tmp_path, *_PYTHON)
    assert ended.returncode == 42, ended.stderr
    assert "permanent failure, restarting will not help: NoValidCheckpoint:" in ended.stderr


@pytest.mark.soak
@pytest.mark.parametrize(
    "launcher", [_PYTHON, _TORCHRUN] if SOAK else [_PYTHON], ids=["python", "torchrun"][: 1 + SOAK]
)
def test_a_starting_point_that_does_not_exist_ends_with_42(tmp_path: Path, launcher: tuple[str, ...]) -> None:
    """Although the launcher may restart it three times."""
    ended = _script(tmp_path, *launcher, RESUME="base/checkpoint-7")
    assert ended.returncode == 42, ended.stderr
    refusal = f"ConfigError: resume_from_checkpoint='{tmp_path}/base/checkpoint-7'"
    assert f"permanent failure, restarting will not help: {refusal}" in ended.stderr


_SCRIPT = """
import os, torch
from transformers import BertConfig, BertForMaskedLM, Trainer, TrainingArguments

width = int(os.environ.get("WIDTH", "8"))
small = BertConfig(vocab_size=9, hidden_size=width, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8)
args = TrainingArguments(
    "out", save_only_model="ONLY_MODEL" in os.environ, use_cpu=True, report_to=[], max_steps=2, disable_tqdm=True,
)
data = [{"input_ids": torch.ones(3, dtype=torch.long), "labels": torch.ones(3, dtype=torch.long)}] * 32
Trainer(model=BertForMaskedLM(small), args=args, train_dataset=data).train(os.environ.get("RESUME"))
"""


def test_a_callback_that_raises_in_a_save(job: HfJob) -> None:
    often = job.but(save_strategy="steps", save_steps=4)
    goes = replace(often, raising=8)
    result = attempt(goes)[0]
    assert result.exit_code == 1, str(result)
    assert "the callback refuses" in result.output
    assert checkpoints(job) == ["checkpoint-4"]
    whole_run = undisturbed(often)
    found = train_to_end(often)
    assert found["end-0.json"] == whole_run["end-0.json"]
    assert len(found["losses-0.jsonl"]) == len(whole_run["losses-0.jsonl"]) + 4, "from step 4 on, again"


def test_a_starting_point(job: HfJob, tmp_path: Path) -> None:
    """A path that the script passes is where the run starts, not where each attempt resumes."""
    train_to_end(job.but(max_steps=10, save_strategy="steps", save_steps=10))
    shutil.move(job.output / "checkpoint-10", tmp_path / "base")
    shutil.rmtree(job.output)
    given = replace(job, given=str(tmp_path / "base"))
    assert "saved step 15" in stopped(given, *told(5))
    output = attempt(given)[0].output
    assert "the run started from" in output
    assert seen(job.folder)["end-0.json"]["steps"] == 30
    shutil.copytree(tmp_path / "base", tmp_path / "elsewhere")
    refused(replace(job, given=str(tmp_path / "elsewhere")), "of a run that did not")
    refused(replace(job, given=str(tmp_path / "nowhere")), "there is no such folder")


@pytest.mark.parametrize("ranks", [1, 2])
def test_starting_points_that_cannot_be_resumed_from(job: HfJob, tmp_path: Path, ranks: int) -> None:
    base = tmp_path / "base"
    trained = base / "checkpoint-2"

    def refused_with(path: Path, *words: str) -> None:
        refused(replace(job, given=str(path)), f"resume_from_checkpoint='{path}'", *words, ranks=ranks)

    refused_with(trained, "there is no such folder. Leave it out")
    train_to_end(job.but(max_steps=2, output_dir=str(base)), ranks)
    refused_with(base / "checkpoint-1", f"there is no such folder. Pass {trained}")
    (tmp_path / "empty").mkdir()
    refused_with(tmp_path / "empty", "the folder is empty")
    refused_with(base, f"no trainer_state.json. Pass {trained}")
    refused_with(trained / "model.safetensors", "not a folder")
    (trained / "optimizer.pt").unlink()
    refused_with(trained, "optimizer.pt is missing")
    assert not list(job.output.glob("checkpoint-*"))


@pytest.mark.parametrize("given", [True, "True", "false", ""])
def test_resume_where_nothing_is(job: HfJob, given: bool | str) -> None:
    short = job.but(max_steps=3)
    assert train_to_end(replace(short, given=given)) == undisturbed(short)
