"""Tokenizers without a chat template or a padding token: what is added to them is trained, resumed and merged."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors import safe_open

from reprieve.testing import terminate
from tests.support.finetune_kit import finish, run, start
from tests.support.jobs.finetune_jobs import FinetuneJob, finetune_on_day, generate


@pytest.mark.parametrize(("shape", "adds"), [("llama", "yes"), ("qwen2", "yes"), ("llama", "no")])
def test_a_tokenizer_without_a_chat_template(tiny: Path, tmp_path: Path, shape: str, adds: str) -> None:
    """Llama's has no padding token either; the embeddings of Qwen2 are also its output layer."""
    model = Path(shutil.copytree(tiny / shape, tmp_path / "model"))
    (model / "chat_template.jinja").unlink()
    config = json.loads((model / "tokenizer_config.json").read_text())
    config["extra_special_tokens"] = [each for each in config["extra_special_tokens"] if each != "<|im_start|>"]
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    job = FinetuneJob(str(tmp_path / "job"), str(model), str(tiny / "chat.jsonl"))
    job = job.but(steps=6, add_special_tokens=adds, merge="yes")
    undisturbed = FinetuneJob(str(tmp_path / "undisturbed"), job.model, job.data, job.options)
    [stopped] = start(job, terminate(0, "forward", nth=3))
    assert stopped.exit_code == 143, str(stopped)
    [result] = finish(job)
    finish(undisturbed)
    assert job.adapter() == undisturbed.adapter()
    said = "the tokenizer gets a chat template" if adds == "yes" else "turns begin with a line like '### user:'"
    assert said in result.output
    assert "the model learns all answers" in result.output
    assert (job.output / "final" / "chat_template.jinja").is_file()
    rows = json.loads((model / "config.json").read_text())["vocab_size"]
    added = adds == "yes" and shape == "llama"  # Qwen2 has the token
    assert json.loads((job.output / "final" / "config.json").read_text())["vocab_size"] == rows + added
    with safe_open(job.output / "adapter_model.safetensors", "pt") as adapter:
        learned = [name for name in adapter.keys() if "token" in name]  # noqa: SIM118 - not a dict
    assert bool(learned) == added, learned


@pytest.mark.parametrize("pad", ["<|finetune_right_pad_id|>", "<|reserved_special_token_0|>", "<|eot_id|>"])
def test_padding_takes_no_new_embedding(tiny: Path, tmp_path: Path, pad: str) -> None:
    """The adapter fits the model as it is, and what pads has no effect on it: not the end of a text either."""
    model = Path(shutil.copytree(tiny / "llama", tmp_path / "model"))
    free = "<|other|>" if pad == "<|eot_id|>" else pad
    for path in model.glob("tokenizer*.json"):
        path.write_text(path.read_text().replace("<|finetune_right_pad_id|>", free))
    job = FinetuneJob(str(tmp_path / "job"), str(model), str(tiny / "chat.jsonl")).but(steps=4)
    padded = FinetuneJob(str(tmp_path / "padded"), job.model, job.data, job.options)
    finish(job)
    [result] = finish(padded.but(add_special_tokens="yes", merge="yes"))
    assert f"the tokenizer pads with {pad}" in result.output
    assert json.loads((padded.output / "tokenizer_config.json").read_text())["pad_token"] == pad
    for path in padded.output.rglob("adapter_model.safetensors"):
        with safe_open(path, "pt") as adapter:
            assert all("lora_" in name for name in adapter.keys()), path  # noqa: SIM118 - not a dict
    assert padded.adapter() == job.adapter()
    [result] = run(generate, padded, str(tmp_path / "generated.json"))
    assert result.ok, str(result)
    generated = json.loads((tmp_path / "generated.json").read_text())
    assert generated["final"] == generated["adapted"] != generated["base"]


def test_a_date_in_the_chat_template_is_that_of_the_first_start(tiny: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(tiny / "llama", tmp_path / "model"))
    template = model / "chat_template.jinja"
    template.write_text("{{ strftime_now('%d %b %Y') }}" + template.read_text())
    job = FinetuneJob(str(tmp_path / "job"), str(model), str(tiny / "chat.jsonl")).but(steps=6)
    undisturbed = FinetuneJob(str(tmp_path / "undisturbed"), job.model, job.data, job.options)
    [stopped] = run(finetune_on_day, job, "2026-02-27", faults=[terminate(0, "forward", nth=3)])
    assert stopped.exit_code == 143, str(stopped)
    shutil.rmtree(Path(job.folder) / "cache")  # another pod has none
    for each, day in ((job, "2026-03-18"), (undisturbed, "2026-02-27")):
        [result] = run(finetune_on_day, each, day)
        assert result.ok, str(result)
    assert job.adapter() == undisturbed.adapter()
    assert "strftime_now" in (job.output / "chat_template.jinja").read_text(), "the tokenizer keeps its template"
