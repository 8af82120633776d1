"""examples/trainer without a cluster: the callback, the manifests, and what setup-env.sh does on a bare machine.

What needs a cluster is in tests/cluster/test_pytorchjob.py.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.hf_kit import attempt, undisturbed
from tests.support.jobs.hf_jobs import HfJob, seen, train
from tests.support.jobs.stop_scenario_jobs import told
from tests.support.places import ROOT

TRAINER = ROOT / "examples/trainer"
TOKEN = "hf_notARealToken"
RECORD = """#!/bin/bash
printf '%s\\n' "$*" >> "$(dirname "$0")/arguments"
env >> "$(dirname "$0")/environment"
if [[ $1 == create ]]; then cat > "$(dirname "$0")/token"; fi
"""


def train_with_callback(job: HfJob) -> None:
    sys.path.insert(0, str(TRAINER))
    from graceful_shutdown_callback import GracefulShutdownCallback  # type: ignore[import-not-found]

    train(replace(job, callbacks=(GracefulShutdownCallback(),)))


def test_the_callback_stops_all_ranks_and_the_next_start_resumes(tmp_path: Path) -> None:
    job = HfJob(str(tmp_path / "job"), safe=False)
    for result in attempt(job, *told(6, rank=1), ranks=2, fn=train_with_callback):
        assert result.exit_code == 143, str(result)
    for result in attempt(job, ranks=2, fn=train_with_callback):
        assert result.ok, str(result)
    assert seen(job.folder) == undisturbed(job, ranks=2)


def manifest(name: str) -> dict[str, Any]:
    """The objects of a manifest by their kind."""
    return {each["kind"]: each for each in yaml.safe_load_all((TRAINER / name).read_text())}


@pytest.mark.parametrize("name", ["fine_tune_job.yaml", "fine_tune_job_manual.yaml"])
def test_a_pod_has_the_grace_period_that_its_training_knows(name: str) -> None:
    for replica in manifest(name)["PyTorchJob"]["spec"]["pytorchReplicaSpecs"].values():
        pod = replica["template"]["spec"]
        for container in [*pod["containers"], *pod.get("initContainers", [])]:
            values = {each["name"]: each.get("value") for each in container["env"]}
            grace = str(pod["terminationGracePeriodSeconds"] - 2)
            assert values["REPRIEVE_GRACE"] == grace
            assert values.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", grace) == grace


def test_all_manifests_are_of_one_job() -> None:
    names = sorted(path.name for path in TRAINER.glob("*.yaml"))
    assert names == ["fine_tune_job.yaml", "fine_tune_job_manual.yaml", "fine_tune_trainjob.yaml"]
    for name in names:
        found = manifest(name)
        assert {each["metadata"]["name"] for each in found.values()} == {"ftjb", "ftjb-workspace"}
        assert found["ConfigMap"]["data"].items() >= manifest(names[0])["ConfigMap"]["data"].items()
        assert found["PersistentVolumeClaim"] == manifest(names[0])["PersistentVolumeClaim"]


# setup-env.sh


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the script, and a kubectl that records what it gets."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/kubectl").write_text(RECORD)
    (tmp_path / "bin/kubectl").chmod(0o755)
    for name in ("setup-env.sh", ".env.example"):
        shutil.copy(TRAINER / name, tmp_path)
    return tmp_path


def set_up(folder: Path, *options: str, path: str | None = None) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PATH": path or f"{folder}/bin:{os.environ['PATH']}"}
    return subprocess.run(["/bin/bash", folder / "setup-env.sh", *options], env=env, capture_output=True, text=True)


@pytest.mark.parametrize(
    "content",
    [
        f"HF_TOKEN={TOKEN}",
        f"# mine\n\nexport HF_TOKEN = '{TOKEN}'\nOTHER=1\n",
        f'HF_TOKEN="{TOKEN}"\r\n',
        f"HF_TOKEN=old\nHF_TOKEN={TOKEN}  \n",
    ],
    ids=["plain", "exported", "quoted", "the last one"],  # pytest puts the id into the environment
)
def test_the_token_goes_through_a_pipe_only(folder: Path, content: str) -> None:
    (folder / ".env").write_text(content)
    done = set_up(folder, "--namespace=mine")
    assert done.returncode == 0, done.stderr
    assert (folder / "bin/token").read_text() == TOKEN
    for text in (
        done.stdout,
        done.stderr,
        *((folder / "bin" / name).read_text() for name in ("arguments", "environment")),
    ):
        assert TOKEN not in text
    assert all("--namespace=mine" in line for line in (folder / "bin/arguments").read_text().splitlines())
    assert (folder / ".env").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    ("given", "used"),
    [
        ("kubeConfig.yaml", ["kubeConfig.yaml"]),
        ("none.yaml:kubeConfig.yaml:/elsewhere/config", ["none.yaml", "kubeConfig.yaml", "/elsewhere/config"]),
        ("beside.yaml", ["trainer/beside.yaml"]),
    ],
    ids=["one", "several", "beside the script"],
)
def test_a_relative_kubeconfig_is_found_from_the_folder_of_the_script(
    tmp_path: Path, folder: Path, given: str, used: list[str]
) -> None:
    """As the README has it: the variable is set in examples/, and the script runs in examples/trainer/."""
    trainer = shutil.copytree(folder, tmp_path / "examples/trainer", ignore=shutil.ignore_patterns("examples"))
    (trainer / ".env").write_text(f"HF_TOKEN={TOKEN}")
    (trainer.parent / "kubeConfig.yaml").touch()
    (trainer / "beside.yaml").touch()
    command = f"cd {trainer.parent}; export KUBECONFIG={given}; cd trainer/; ./setup-env.sh; cd .."
    env = {**os.environ, "PATH": f"{trainer}/bin:{os.environ['PATH']}"}
    subprocess.run(["bash", "-c", command], env=env, check=True)
    recorded = (trainer / "bin/environment").read_text().splitlines()
    found = {line.removeprefix("KUBECONFIG=") for line in recorded if line.startswith("KUBECONFIG=")}
    [entries] = [value.split(":") for value in found]
    assert [(trainer / entry).resolve() for entry in entries if (trainer / entry).exists()] == [
        (trainer.parent / entry).resolve() for entry in used if (trainer.parent / entry).exists()
    ]
    assert [Path(entry).name for entry in entries] == [Path(entry).name for entry in used], "none is lost"


def test_tracing_does_not_show_the_token(folder: Path) -> None:
    (folder / ".env").write_text(f"HF_TOKEN={TOKEN}")
    env = {**os.environ, "PATH": f"{folder}/bin:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-x", folder / "setup-env.sh"], env=env, capture_output=True, text=True)
    assert done.returncode == 0 and TOKEN not in done.stderr, done.stderr


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, ".env is missing: cp "),
        ("", "has no HF_TOKEN: write a line HF_TOKEN=hf_"),
        ("HF_TOKEN=\n", "has no HF_TOKEN"),
        ("HF_TOKEN=hf_one hf_two\n", "contains a space"),
    ],
)
def test_a_token_that_is_missing(folder: Path, content: str | None, words: str) -> None:
    if content is not None:
        (folder / ".env").write_text(content)
    done = set_up(folder)
    assert done.returncode == 1 and words in done.stderr, done.stderr
    assert not (folder / "bin/arguments").exists(), "nothing was changed"


def test_kubectl_that_is_missing(folder: Path) -> None:
    (folder / "empty").mkdir()
    (folder / "empty/dirname").symlink_to(shutil.which("dirname") or "")
    done = set_up(folder, path=str(folder / "empty"))
    assert done.returncode == 1 and "kubectl is missing: https://" in done.stderr, done.stderr


def test_the_example_of_the_env_file_asks_for_a_token(folder: Path) -> None:
    shutil.copy(folder / ".env.example", folder / ".env")
    assert "has no HF_TOKEN" in set_up(folder).stderr


def test_secrets_stay_out_of_git_and_of_the_image() -> None:
    for path in (".env", ".env.production"):
        ignored = subprocess.run(["git", "check-ignore", "--quiet", TRAINER / path], cwd=ROOT)
        assert ignored.returncode == 0, path
    allowed = [line for line in (TRAINER / ".dockerignore").read_text().splitlines() if not line.startswith("#")]
    assert allowed[0] == "*" and not [line for line in allowed if "env" in line]
    assert json.dumps(manifest("fine_tune_job.yaml")).count("hf-secrets") == 2
