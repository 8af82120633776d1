"""What cannot be trained ends with 42 and one line that says what to do, before anything is trained."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from reprieve.finetune import merge
from tests.support.finetune_kit import run, start
from tests.support.jobs.finetune_jobs import FinetuneJob, save_without_rows


@pytest.fixture
def job(tiny: Path, tmp_path: Path) -> FinetuneJob:
    return FinetuneJob(str(tmp_path / "job"), str(tiny / "llama"), str(tiny / "chat.jsonl")).but(steps=2)


def refused(job: FinetuneJob, words: str, ranks: int = 1) -> str:
    """Run a start that must be refused, and return its only error."""
    results = start(job, ranks=ranks)
    for result in results:
        assert result.exit_code == 42, str(result)
    errors = [line for line in results[0].output.splitlines() if "reprieve: error: " in line]
    assert len(errors) == 1, str(results[0])
    assert "Failed to load" not in results[0].output, "what datasets logs of the same"
    assert words in errors[0], errors[0]
    assert "src/reprieve/finetune/" not in results[0].output, "no traceback but that of the test's own SystemExit"
    assert not list(job.output.glob("checkpoint-*"))
    return errors[0]


def written(folder: Path, name: str, content: str) -> str:
    (folder / name).write_text(content)
    return str(folder / name)


def changed(tiny: Path, folder: Path, change: Callable[[Path], object]) -> str:
    """Return a changed copy of the model."""
    copy = Path(shutil.copytree(tiny / "llama", folder / "model"))
    change(copy)
    return str(copy)


def test_no_such_model(job: FinetuneJob, tmp_path: Path) -> None:
    refused(job.but(model_name=tmp_path / "models/llama"), f"there is no models in {tmp_path}. Check the path, or give")
    refused(job.but(model_name="./llama"), "there is no llama in")
    refused(job.but(model_name="no one/knows"), "there is no ")


def test_a_file_where_the_output_should_be(job: FinetuneJob) -> None:
    job.output.parent.mkdir()
    job.output.write_text("not a folder")
    refused(job, f"cannot use {job.output} for checkpoints: there is a file where the folder should be")


def test_nothing_in_the_cache(job: FinetuneJob) -> None:
    line = refused(job.but(model_name="tiny/llama", local_files_only="yes"), "is neither a folder here nor complete in")
    assert "nothing is downloaded because HF_HUB_OFFLINE is set" in line
    refused(job.but(dataset_path="tiny/sums", local_files_only="yes"), "--dataset_path tiny/sums is neither a folder")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda model: (model / "config.json").unlink(), "is no model: it has no config.json, but chat_template.jinja"),
        (lambda model: (model / "model.safetensors").unlink(), "has no weights (*.safetensors), but chat_template"),
        (lambda model: [each.unlink() for each in model.glob("tokenizer*")], "has no tokenizer (tokenizer.json), but"),
        (lambda model: (model / "config.json").rename(model / "adapter_config.json"), "is an adapter, not a whole"),
        (lambda model: (model / "model.safetensors").write_bytes(b"torn"), "the model of --model_name"),
    ],
)
def test_a_folder_that_is_no_whole_model(
    job: FinetuneJob, tiny: Path, tmp_path: Path, change: Callable[[Path], object], words: str
) -> None:
    refused(job.but(model_name=changed(tiny, tmp_path, change)), words)


def test_a_snapshot_without_its_blobs(job: FinetuneJob, tiny: Path, tmp_path: Path) -> None:
    [snapshot] = (tiny / "hub" / "models--tiny--llama" / "snapshots").iterdir()
    copy = shutil.copytree(snapshot, tmp_path / "snapshot", symlinks=True)
    refused(job.but(model_name=copy), "config.json is a link to ../../blobs/")


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        (
            "data.jsonl",
            '{"frage": "a", "antwort": "b"}\n',
            "the columns of the data are not recognised: frage, antwort",
        ),
        ("data.jsonl", "", "is empty: there is nothing to train with"),
        ("data.json", "[]", "is empty: there is nothing to train with"),
        ("data.csv", "prompt,completion\n", "is empty: there is nothing to train with"),
        ("data.jsonl", '{"prompt": "a", "completion": ""}\n', "has an answer: read as prompt/completion"),
        ("data.jsonl", "not json\n", "cannot be read: "),
        ("data.txt", "a", "is no file of a known format: give .json, .jsonl, .csv or .parquet"),
        ("data.jsonl", '{"messages": ["a"]}\n', "is no turn of a conversation: write [{"),
    ],
)
def test_data_that_nothing_can_be_learned_from(
    job: FinetuneJob, tmp_path: Path, name: str, content: str, words: str
) -> None:
    refused(job.but(dataset_path=written(tmp_path, name, content)), words)


def test_tables_without_a_row(job: FinetuneJob, tmp_path: Path) -> None:
    [result] = run(save_without_rows, str(tmp_path))
    assert result.ok, str(result)
    for name in ("data.parquet", "saved"):
        words = f"--dataset_path {tmp_path / name} is empty: there is nothing to train with"
        refused(job.but(dataset_path=tmp_path / name), words)


STRICT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{{ message['content'] }}{% endfor %}"
)


@pytest.mark.parametrize("before", [0, 250], ids=["the first", "after those that are inspected first"])
def test_a_sample_that_the_chat_template_refuses(job: FinetuneJob, tiny: Path, tmp_path: Path, before: int) -> None:
    """As those of Mistral and Gemma do."""
    model = changed(tiny, tmp_path, lambda model: (model / "chat_template.jinja").write_text(STRICT_TEMPLATE))
    turns = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
    rows = [turns] * before + [[{"role": "system", "content": "Add."}, *turns]]
    data = written(tmp_path, "data.jsonl", "".join(json.dumps({"messages": row}) + "\n" for row in rows))
    words = f"refuses sample {before + 1}, which begins with 'Add.': no system role. Change the data"
    refused(job.but(model_name=model, dataset_path=data), words)


def test_samples_that_are_all_too_long(job: FinetuneJob) -> None:
    refused(job.but(max_length=8), "all 48 samples are longer than --max_length 8: the shortest has ")


def test_targets_that_no_module_has(job: FinetuneJob) -> None:
    line = refused(job.but(lora_targets="q_proj,qkv"), "--lora_targets qkv matches no module: there are ", ranks=2)
    assert line.endswith("down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj")
    refused(job.but(lora_targets="lm_head"), "--lora_targets lm_head: TRL trains no adapter of the output layer")


def test_splits_that_are_not_there(job: FinetuneJob) -> None:
    refused(job.but(eval_split="validation"), "--eval_split validation: ")
    refused(job.but(eval_split="48"), "--eval_split 48 leaves nothing of 48 samples to train with")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=68m", "tmpfs", folder], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"cannot mount: {mounted.stderr.decode()}")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


@pytest.mark.root
def test_no_room_for_the_merged_model(job: FinetuneJob, small_disk: Path) -> None:
    job = FinetuneJob(str(small_disk), job.model, job.data, job.options)
    job.output.mkdir()
    (job.output / "other").write_bytes(bytes(8 << 20))
    refused(job.but(merge="yes"), "no room for the merged model: ")
    # That of a merge that was stopped is removed before the next.
    (job.output / ".final.saving").mkdir()
    (job.output / "other").rename(job.output / ".final.saving/model.safetensors")
    merge.check_room(job.output, Path(job.model))


def test_a_refused_job_needs_neither_torch_nor_a_second(tmp_path: Path) -> None:
    """As a real command; a script that is wrong must not cost the start of a training."""
    code = (
        "import json, sys\nfrom reprieve.cli import execute\n"
        "words = ['--model_name', 'none/at/all', '--dataset_path', 'x', '--output_dir', sys.argv[1]]\n"
        "code = execute(['finetune', *words])\n"
        "heavy = sorted({'torch', 'transformers', 'datasets', 'huggingface_hub'} & set(sys.modules))\n"
        "print(json.dumps([code, heavy]))\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "out")], capture_output=True, text=True)
    assert json.loads(done.stdout) == [42, []], done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
