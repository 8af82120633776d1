"""`reprieve finetune`, interrupted at random: the adapter is the undisturbed one, and `final/` is base and adapter."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest

from reprieve.testing import fail, pause, terminate
from tests.support.finetune_kit import finish, run, start
from tests.support.jobs.finetune_jobs import FinetuneJob, finetune_noting_flushes, generate, plain


class Case(NamedTuple):
    """What is trained, on how many ranks."""

    shape: str
    ranks: int
    data: str
    options: dict[str, object]


CASES = [
    Case("llama", 1, "chat.jsonl", {"epochs": 1, "eval_split": 8}),
    Case("llama", 2, "completions.csv", {"epochs": 2}),
    Case("qwen2", 1, "saved", {"epochs": 2, "eval_split": 0.1, "packing": "yes", "max_length": 48, "batch_size": 1}),
    Case("qwen2", 2, "alpaca.parquet", {"epochs": 4, "accumulation": 2}),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.shape}-{case.ranks}-{case.data}")
def test_five_interruptions_at_random(tiny: Path, tmp_path: Path, case: Case) -> None:
    job = FinetuneJob(str(tmp_path / "job"), str(tiny / case.shape), str(tiny / case.data)).but(**case.options)
    undisturbed = FinetuneJob(str(tmp_path / "undisturbed"), job.model, job.data, job.options)
    inputs = {path: path.stat().st_mtime_ns for path in tiny.rglob("*")}
    drawn = random.Random(repr(case))
    for number in range(5):
        rank, nth = drawn.randrange(case.ranks), drawn.randint(1, 4)
        delay = [pause(rank, "forward", 0.2, nth=nth)] if drawn.random() < 0.5 else []
        for result in start(job, terminate(rank, "forward", nth=nth), *delay, ranks=case.ranks):
            assert result.exit_code == 143, f"start {number}, rank {rank}, step {nth}: {result}"
    merged = job.but(merge="yes")
    finish(merged, case.ranks)
    finish(undisturbed, case.ranks)
    assert merged.adapter() == undisturbed.adapter()
    found, expected = merged.summary(), undisturbed.summary()
    for name in ("losses", "evaluations", "steps", "tokens"):
        assert found[name] == expected[name], name
    assert (found["interruptions"], expected["interruptions"]) == (5, 0)
    assert {path: path.stat().st_mtime_ns for path in tiny.rglob("*")} == inputs, "nothing is written beside the data"
    [result] = run(generate, merged, str(tmp_path / "generated.json"))
    assert result.ok, str(result)
    generated = json.loads((tmp_path / "generated.json").read_text())
    assert generated["final"] == generated["adapted"]
    assert generated["final"] != generated["base"], "the adapter must change something"
    assert not list((merged.output / "final").glob("adapter*"))


def test_as_with_trl_alone(tiny: Path, tmp_path: Path) -> None:
    job = FinetuneJob(str(tmp_path / "job"), str(tiny / "llama"), str(tiny / "completions.csv")).but(steps=10)
    stock = FinetuneJob(str(tmp_path / "stock"), job.model, job.data, job.options)
    [stopped] = start(job, terminate(0, "forward", nth=4))
    assert stopped.exit_code == 143, str(stopped)
    finish(job)
    [result] = run(plain, stock)
    assert result.ok, str(result)
    assert job.adapter() == stock.adapter()


def test_a_finished_job_does_not_train_again(tiny: Path, tmp_path: Path) -> None:
    job = FinetuneJob(str(tmp_path / "job"), str(tiny / "llama"), str(tiny / "chat.jsonl")).but(steps=2)
    [first] = finish(job)
    assert "finished: " in first.output
    words = "48 samples of the form chat (columns messages); the model learns the last answer (the chat template does"
    assert words in first.output
    before = {path: path.stat().st_mtime_ns for path in job.output.rglob("*")}
    [second] = finish(job)
    assert "is finished: nothing is left to train" in second.output
    assert {path: path.stat().st_mtime_ns for path in job.output.rglob("*")} == before
    [later] = finish(job.but(merge="yes"))
    assert (job.output / "final" / "model.safetensors").is_file(), str(later)
    assert "'loss'" not in later.output, "merging later does not train"


def test_another_model_or_other_data_do_not_continue_a_training(tiny: Path, tmp_path: Path) -> None:
    """The result would be the adapter of the model and the data before, and called finished."""
    job = FinetuneJob(str(tmp_path / "job"), str(tiny / "llama"), str(tiny / "chat.jsonl")).but(steps=2)
    finish(job)
    adapter = job.adapter()
    for option, value in (("model_name", tiny / "qwen2"), ("dataset_path", tiny / "alpaca.csv")):
        [result] = start(job.but(**{option: value}))
        assert result.exit_code == 42, str(result)
        assert f"has checkpoints of --{option} {tiny}" in result.output
        assert f"and not of {value}: choose another --output_dir" in result.output
    assert job.adapter() == adapter
    finish(job.but(model_name=f"{tiny}/./llama/", dataset_path=f"file://{tiny}/chat.jsonl"))
    assert job.adapter() == adapter, "the same, written in another way"
    [result] = start(job.but(dataset_path=tiny / "alpaca.csv"), CHECKPOINT_RESUME="false", REPRIEVE_RUN="again")
    assert result.ok and job.adapter() != adapter, str(result)


def test_an_adapter_of_another_rank_is_refused_in_one_line(tiny: Path, tmp_path: Path) -> None:
    """Torch lists all weights whose shape is another."""
    job = FinetuneJob(str(tmp_path / "job"), str(tiny / "llama"), str(tiny / "chat.jsonl")).but(steps=2)
    finish(job)
    [result] = start(job.but(lora_rank=8, steps=4))
    assert result.exit_code == 42, str(result)
    [error] = [line for line in result.output.splitlines() if "does not fit this model: " in line]
    assert "size mismatch for " in error and " and 2" in error and "start over (reprieve run --fresh)" in error


def test_a_merged_model_of_an_earlier_training_is_replaced(tiny: Path, tmp_path: Path) -> None:
    job = FinetuneJob(str(tmp_path / "job"), str(tiny / "llama"), str(tiny / "chat.jsonl")).but(batch_size=16)
    finish(job.but(epochs=1, merge="yes"))
    before = (job.output / "final/model.safetensors").read_bytes()
    finish(job.but(epochs=2))
    [later] = finish(job.but(epochs=2, merge="yes"))
    assert "merging the adapter into" in later.output
    assert (job.output / "final/model.safetensors").read_bytes() != before


def test_a_request_to_start_over_is_carried_out_once(tiny: Path, tmp_path: Path) -> None:
    job = FinetuneJob(str(tmp_path / "job"), str(tiny / "llama"), str(tiny / "chat.jsonl")).but(steps=2)
    finish(job)
    for expected in ("finished: ", "is finished: nothing is left to train"):
        [result] = start(job, CHECKPOINT_RESUME="false", REPRIEVE_RUN="again")
        assert result.ok and expected in result.output, str(result)


def test_the_adapter_is_durable_before_the_record_says_that_it_is_there(tiny: Path, tmp_path: Path) -> None:
    job = FinetuneJob(str(tmp_path / "job"), str(tiny / "llama"), str(tiny / "chat.jsonl")).but(steps=2)
    [result] = run(finetune_noting_flushes, job, str(tmp_path / "note"))
    assert result.ok, str(result)
    flushed = json.loads((tmp_path / "note").read_text())
    records = [number for number, path in enumerate(flushed) if path == str(job.output / "finetune.json.new")]
    assert len(records) == 3, "at the start, after the training, at the end"
    for name in ("adapter_model.safetensors", "adapter_config.json", "tokenizer.json"):
        assert records[0] < flushed.index(str(job.output / name)) < records[1]


def test_a_generation_config_that_cannot_be_saved(tiny: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(tiny / "llama", tmp_path / "model"))
    (model / "generation_config.json").write_text('{"do_sample": false, "temperature": 0.6, "top_p": 0.9}')
    job = FinetuneJob(str(tmp_path / "job"), str(model), str(tiny / "chat.jsonl")).but(steps=2, merge="yes")
    [result] = finish(job)
    assert "final/ gets do_sample=True: the model's generation_config.json has values for sampling" in result.output
    saved = json.loads((job.output / "final/generation_config.json").read_text())
    assert saved.items() >= {"do_sample": True, "temperature": 0.6, "top_p": 0.9}.items()


def test_a_stop_in_the_merge(tiny: Path, tmp_path: Path) -> None:
    """The other rank waits until the result is there: torchrun would not start it again if it had ended with 0."""
    job = FinetuneJob(str(tmp_path / "job"), str(tiny / "llama"), str(tiny / "chat.jsonl")).but(steps=2, merge="yes")
    first, second = start(job, terminate(0, "merge"), ranks=2)
    assert first.exit_code == 143, str(first)
    assert second.exit_code == 143, str(second)
    assert not (job.output / "final").exists()
    first, second = start(job, fail(0, "merge", OSError("cut off")), ranks=2)
    assert (first.exit_code, second.exit_code) == (1, 1), f"{first}\n{second}"
    first, second = finish(job, ranks=2)
    assert "'loss'" not in first.output
    assert (job.output / "final" / "model.safetensors").is_file()
