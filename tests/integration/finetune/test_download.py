"""Models and data from a hub: downloaded once for a node, pinned for the run, and refused in one line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from reprieve.testing import Result, terminate
from tests.support.finetune_kit import run
from tests.support.hub import TOKEN, Hub, serving
from tests.support.jobs.finetune_jobs import FinetuneJob, finetune_from_hub


@pytest.fixture
def hub(tiny: Path) -> Iterator[Hub]:
    data = next((tiny / "hub" / "datasets--tiny--sums" / "snapshots").iterdir())
    with serving(Hub({"models/tiny/llama": tiny / "llama", "datasets/tiny/sums": data})) as hub:
        yield hub


@pytest.fixture
def job(tmp_path: Path) -> FinetuneJob:
    return FinetuneJob(str(tmp_path / "job"), "tiny/llama", "tiny/sums").but(steps=4)


def start(job: FinetuneJob, hub: Hub, *faults: object, ranks: int = 1, **env: str) -> list[Result]:
    cache = str(Path(job.folder).parent / "hub")
    return run(finetune_from_hub, job, hub.url, cache, ranks=ranks, faults=faults, **env)  # type: ignore[arg-type]


def test_two_ranks_download_once_and_resume_with_the_same_commit(job: FinetuneJob, hub: Hub, tiny: Path) -> None:
    hub.gated.add("models/tiny/llama")
    job = job.but(steps=12)  # enough to train on while the ranks agree on the step to stop at
    for result in start(job, hub, terminate(1, "forward", nth=2), ranks=2, HF_TOKEN=TOKEN):
        assert result.exit_code == 143, str(result)
        assert TOKEN not in result.output
    assert set(hub.downloads) >= {"model.safetensors", "config.json", "tokenizer.json", "chat.jsonl"}
    assert set(hub.downloads.values()) == {1}, hub.downloads
    first, hub.commit = hub.commit, "2" * 40
    for result in start(job, hub, ranks=2, HF_TOKEN=TOKEN):
        assert result.ok, str(result)
    assert set(hub.downloads.values()) == {1}, "the new commit is not used"
    record = json.loads((job.output / "finetune.json").read_text())
    assert record["commits"] == {"model": first, "dataset": first}
    adapter = json.loads((job.output / "adapter_config.json").read_text())
    assert (adapter["base_model_name_or_path"], adapter["revision"]) == ("tiny/llama", first)
    written = b"".join(path.read_bytes() for path in job.output.rglob("*") if path.is_file())
    assert TOKEN.encode() not in written


@pytest.mark.parametrize(
    ("token", "words"),
    [
        ("", "--model_name tiny/llama is gated, and HF_TOKEN is not set: accept its conditions at https://huggingface"),
        ("hf_wrong", "--model_name tiny/llama is gated, and HF_TOKEN has no access to it: accept its conditions"),
    ],
)
def test_a_gated_model(job: FinetuneJob, hub: Hub, token: str, words: str) -> None:
    hub.gated.add("models/tiny/llama")
    [result] = start(job, hub, HF_TOKEN=token)
    assert result.exit_code == 42, str(result)
    assert words in result.output
    assert not token or token not in result.output
    assert hub.tokens == ({f"Bearer {token}"} if token else {None})


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ({"model_name": "tiny/other"}, "--model_name tiny/other: the hub has no such model, or it is private"),
        ({"dataset_path": "tiny/other"}, "--dataset_path tiny/other: the hub has no such dataset, or it is private"),
    ],
)
def test_nothing_of_that_name(job: FinetuneJob, hub: Hub, option: dict[str, str], words: str) -> None:
    [result] = start(job.but(**option), hub)
    assert result.exit_code == 42, str(result)
    assert words in result.output


@pytest.mark.parametrize(
    ("token", "status", "text", "words"),
    [
        (
            "hf_expired",
            401,
            "Invalid credentials in Authorization header",
            "refuses HF_TOKEN: it is wrong or has expired",
        ),
        (
            "hf_limited",
            403,
            "Please enable access to public gated repositories",
            "refuses HF_TOKEN: it may not read this",
        ),
        ("", 403, "Forbidden", "wants a token: set HF_TOKEN (403)"),
    ],
)
def test_a_token_that_the_hub_refuses(
    job: FinetuneJob, hub: Hub, token: str, status: int, text: str, words: str
) -> None:
    """The library looks into its cache then, and reports that it has found nothing there."""
    hub.refusal = status, text
    [result] = start(job, hub, HF_TOKEN=token)
    assert result.exit_code == 42, str(result)
    assert f"error: --model_name tiny/llama: the hub {words}" in result.output
    assert not token or token not in result.output


def test_a_hub_that_cannot_be_reached_may_be_reached_later(job: FinetuneJob, hub: Hub) -> None:
    hub.url = "http://127.0.0.1:9"
    [result] = start(job, hub)
    assert result.exit_code == 1, str(result)
    assert "error: tiny/llama cannot be downloaded" in result.output
