"""What a user means by a model or by data: a path, a snapshot in a cache, or a hub id."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from examples.finetune.make_tiny import put_into_cache, sums, write

from reprieve.errors import ConfigError
from reprieve.finetune.environment import complete_variables, use_writable_caches
from reprieve.finetune.job_record import JobRecord, read_record
from reprieve.finetune.sources import DATASET, MODEL, HubId, find_source


@pytest.mark.parametrize(
    ("text", "name", "revision"),
    [
        ("org/name", "org/name", None),
        ("gpt2-none", "gpt2-none", None),
        ("org/name@v1.0", "org/name", "v1.0"),
        ("hf://org/name", "org/name", None),
        ("hf://datasets/org/name", "org/name", None),
    ],
)
def test_hub_ids(text: str, name: str, revision: str | None) -> None:
    assert find_source(DATASET, text) == HubId(kind=DATASET, name=name, revision=revision)


@pytest.mark.parametrize("text", ["/none/at/all", "./none", "~/none", "a/b/c", "no one", "file:///none"])
def test_paths_that_are_not_there(text: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"--model_name {text}: there is no ")):
        find_source(MODEL, text)


def test_snapshots(tmp_path: Path) -> None:
    data = write(tmp_path / "sums.jsonl", sums("chat", 2))
    snapshot = put_into_cache(tmp_path / "hub", "org/sums", data, kind="datasets")
    repository = snapshot.parent.parent
    for given in (snapshot, repository, tmp_path / "hub"):
        assert find_source(DATASET, str(given)) == snapshot, given
    assert find_source(DATASET, f"file://{data}") == data
    write(data, sums("chat", 3))
    newer = put_into_cache(tmp_path / "hub", "org/sums", data, kind="datasets")
    assert find_source(DATASET, str(repository)) == newer, "refs/main names it"
    (repository / "refs" / "main").unlink()
    with pytest.raises(ConfigError, match="name one of its snapshots"):
        find_source(DATASET, str(repository))
    put_into_cache(tmp_path / "hub", "org/other", data, kind="datasets")
    with pytest.raises(ConfigError, match="holds 2 datasets: choose datasets--org--other, datasets--org--sums"):
        find_source(DATASET, str(tmp_path / "hub"))


def test_the_record_of_a_job(tmp_path: Path) -> None:
    assert read_record(tmp_path) is None
    record = JobRecord(options={"model_name": "m"}, commits={MODEL: "1" * 40}, finished=True)
    record.write(tmp_path)
    assert read_record(tmp_path) == record
    JobRecord(options={}, version=2).write(tmp_path)
    assert read_record(tmp_path) is None, "a newer version"


def test_variables_of_a_pod() -> None:
    env = {"MASTER_ADDR": "m", "RANK": "1", "WORLD_SIZE": "2"}
    complete_variables(env)
    assert (env["LOCAL_RANK"], env["LOCAL_WORLD_SIZE"]) == ("0", "1")
    torchrun = {"MASTER_ADDR": "m", "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}
    complete_variables(torchrun)
    assert torchrun["LOCAL_RANK"] == "1"
    alone: dict[str, str] = {"WORLD_SIZE": "1"}
    complete_variables(alone)
    assert alone == {"WORLD_SIZE": "1"}


def test_caches_that_can_be_written(tmp_path: Path) -> None:
    usual: dict[str, str] = {"XDG_CACHE_HOME": str(tmp_path / "home")}
    use_writable_caches(usual, tmp_path)
    assert set(usual) == {"XDG_CACHE_HOME"}
    named = {"HF_HOME": "/dev/null/none"}
    use_writable_caches(named, tmp_path)
    assert named == {"HF_HOME": "/dev/null/none"}
    unwritable = {"XDG_CACHE_HOME": "/dev/null/none", "HF_HUB_CACHE": "/models"}
    use_writable_caches(unwritable, tmp_path)
    assert unwritable["HF_HUB_CACHE"] == "/models"
    assert unwritable["HF_DATASETS_CACHE"] == str(tmp_path / ".cache" / "datasets")
