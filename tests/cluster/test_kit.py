"""The kit's client and helpers, over a program that answers as kubectl does. No cluster is needed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cluster.kit.objects import train_job
from tests.cluster.kit.training import apply_train_jobs
from tests.cluster.rig.kubectl import Kubectl, KubectlError, has_condition

UNREACHABLE = "The connection to the server 10.0.0.1:6443 was refused"
TOO_EARLY = "spec.RuntimeRef: Invalid value: specified trainingRuntime must be created before the TrainJob is created"
COMPLETE = json.dumps({"status": {"conditions": [{"type": "Complete", "status": "True"}]}})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    program = tmp_path / "kubectl"
    # Each line of `errors` is the error of one call; the calls after them succeed.
    program.write_text(
        f"""#!/bin/sh
echo "$1" >> {tmp_path}/calls
error=$(sed -n "$(wc -l < {tmp_path}/calls)p" {tmp_path}/errors)
[ -z "$error" ] || {{ echo "$error" >&2; exit 1; }}
echo '{COMPLETE}'
"""
    )
    program.chmod(0o755)
    return tmp_path


def kubectl(folder: Path, *errors: str) -> Kubectl:
    (folder / "errors").write_text("".join(f"{error}\n" for error in errors))
    return Kubectl([str(folder / "kubectl")])


def calls(folder: Path) -> int:
    return len((folder / "calls").read_text().splitlines())


def test_a_wait_survives_a_moment_without_an_api_server(folder: Path) -> None:
    client = kubectl(folder, UNREACHABLE, UNREACHABLE)
    assert client.wait_for("trainjob", "train", has_condition("Complete")) == json.loads(COMPLETE)
    assert calls(folder) == 3


def test_a_wait_ends_with_the_last_error(folder: Path) -> None:
    client = kubectl(folder, *[UNREACHABLE] * 100)
    with pytest.raises(KubectlError, match=r"10\.0\.0\.1:6443 was refused"):
        client.wait_for("trainjob", "train", has_condition("Complete"), timeout_s=0.3)
    assert calls(folder) > 1


def test_a_job_is_applied_again_until_trainer_has_seen_its_runtime(folder: Path) -> None:
    apply_train_jobs(kubectl(folder, TOO_EARLY, TOO_EARLY), train_job("train", ["true"], runtime="new"))
    assert calls(folder) == 3


def test_a_job_that_is_refused_for_another_reason_is_an_error_at_once(folder: Path) -> None:
    with pytest.raises(KubectlError, match="immutable"):
        apply_train_jobs(kubectl(folder, "field is immutable"), train_job("train", ["true"], runtime="new"))
    assert calls(folder) == 1
