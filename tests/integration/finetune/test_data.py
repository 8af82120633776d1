"""Data as they are on the hub: with splits, configurations and tools, and of conversations for any model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.support.finetune_kit import finish, run, start
from tests.support.jobs.finetune_jobs import FinetuneJob, converted

USER, ASSISTANT = {"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}
CARD = """---
configs:
- config_name: main
  data_files: [{split: train_sft, path: train_sft.jsonl}, {split: test_sft, path: test_sft.jsonl}]
- config_name: socratic
  data_files: [{split: train, path: test_sft.jsonl}]
---
"""


@pytest.fixture
def job(tiny: Path, tmp_path: Path) -> FinetuneJob:
    return FinetuneJob(str(tmp_path / "job"), str(tiny / "llama"), str(tiny / "chat.jsonl")).but(steps=2)


def written(folder: Path, rows: list[dict[str, object]]) -> str:
    path = folder / "data.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_a_split_and_a_configuration(job: FinetuneJob, tiny: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / "README.md").write_text(CARD)
    for split in ("train_sft", "test_sft"):
        shutil.copy(tiny / "chat.jsonl", data / f"{split}.jsonl")
    job = job.but(dataset_path=data)
    for options, words in (
        ({}, "has several configurations: 'main', 'socratic'. Choose one with --dataset_config"),
        ({"dataset_config": "other"}, "BuilderConfig 'other' not found. Available: ['main', 'socratic']"),
        ({"dataset_config": "main"}, "has no split train, but train_sft, test_sft: choose one with --dataset_split"),
    ):
        [result] = start(job.but(**options))
        assert result.exit_code == 42 and words in result.output, str(result)
    chosen = job.but(dataset_config="main", dataset_split="train_sft", eval_split="test_sft")
    finish(chosen)
    assert chosen.summary()["steps"] == 2


def test_tools_reach_the_chat_template(job: FinetuneJob, tiny: Path, tmp_path: Path) -> None:
    """Each row as it is: a table would give each call the arguments of all others."""
    model = Path(shutil.copytree(tiny / "llama", tmp_path / "model"))
    template = (
        "{% if tools %}{{ tools | tojson }} {% endif %}{% for message in messages %}{{ message['content'] }}"
        "{% for call in message.tool_calls or [] %}{{ call.function | tojson }}{% endfor %} {% endfor %}"
    )
    (model / "chat_template.jinja").write_text(template)
    rows: list[dict[str, object]] = []
    for name, argument in (("add", "a"), ("subtract", "b")):
        function = {"name": name, "arguments": {argument: 1}}
        calls = {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": function}]}
        returned = {"role": "tool", "content": "1"}
        tools = [{"type": "function", "function": {"name": name, "parameters": {argument: "int"}}}]
        rows.append({"messages": [USER, calls, returned, ASSISTANT], "tools": tools})
    rows.append({"messages": [USER, ASSISTANT]})
    job = FinetuneJob(job.folder, str(model), written(tmp_path, rows))
    [result] = run(converted, job, str(tmp_path / "note"))
    assert result.ok, str(result)
    first, second, third = json.loads((tmp_path / "note").read_text())["texts"]
    assert first == (
        '[{"type": "function", "function": {"name": "add", "parameters": {"a": "int"}}}] '
        'one {"name": "add", "arguments": {"a": 1}} 1 two '
    )
    assert second == first.replace("add", "subtract").replace('"a"', '"b"')
    assert third == "one two "


@pytest.mark.parametrize("completion", [[ASSISTANT], "two"], ids=["turns", "a text"])
def test_turns_of_prompts_for_a_model_without_a_chat_template(
    job: FinetuneJob, tiny: Path, tmp_path: Path, completion: object
) -> None:
    model = Path(shutil.copytree(tiny / "llama", tmp_path / "model"))
    (model / "chat_template.jinja").unlink()
    data = written(tmp_path, [{"prompt": [USER], "completion": completion}] * 4)
    [result] = finish(job.but(model_name=model, dataset_path=data))
    assert "turns begin with a line like '### user:'" in result.output


def test_what_is_left_out_is_logged(job: FinetuneJob, tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [{"prompt": "one", "completion": ""}]
    rows += [{"prompt": prompt, "completion": "two"} for prompt in ["one " * 100] * 3 + ["one "] * 4]
    [result] = finish(job.but(dataset_path=written(tmp_path, rows), max_length=40))
    assert "1 of 8 samples have no answer and are left out" in result.output
    assert "3 of 7 samples have no answer within --max_length 40 and are left out" in result.output
