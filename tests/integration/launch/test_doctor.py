"""`reprieve doctor`: its checks on this machine, and on machines with problems."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.launch_kit import REPRIEVE, Lab


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return Lab(tmp_path)


def checks(lab: Lab, *words: str, code: int) -> dict[str, dict[str, Any]]:
    output = lab.reprieve("doctor", str(lab.job), "--sample", "32MB", "--json", *words, code=code)
    return {check["name"]: check for check in json.loads(output.out)}


def test_a_machine_on_which_all_is_well(lab: Lab) -> None:
    found = checks(lab, "--state", "1MB", code=0)
    assert {"disk", "room", "grace period", "torchrun", "PID 1", "run records", "Python", "torch"} <= found.keys()
    assert all(check["level"] != "bad" for check in found.values())
    assert all(check["fix"] for check in found.values() if check["level"] != "ok")
    assert not list(lab.job.iterdir()), "nothing is left behind"
    shown = lab.reprieve("doctor", str(lab.job), "--sample", "16MB").out
    assert "/s durable" in shown and "torchrun" in shown


def test_a_state_that_does_not_fit(lab: Lab) -> None:
    lab.env["REPRIEVE_GRACE"] = "5s"
    found = checks(lab, "--state", "900TB", code=1)
    assert found["room"]["level"] == "bad" and "will not fit" in found["room"]["fix"]
    assert found["grace period"]["level"] == "bad" and "reprieve drill" in found["grace period"]["fix"]


def test_torchrun_that_kills_too_soon(lab: Lab) -> None:
    lab.env |= {"REPRIEVE_GRACE": "60s", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "5"}
    found = checks(lab, code=1)
    assert found["torchrun"]["level"] == "bad" and "TORCH_ELASTIC_SHUTDOWN_TIMEOUT" in found["torchrun"]["fix"]


def test_a_shell_as_the_first_process(lab: Lab) -> None:
    if os.geteuid() != 0:
        pytest.skip("a PID namespace needs root")
    words = " ".join([*REPRIEVE, "doctor", str(lab.job), "--sample", "16MB", "--json"])
    inside = ["unshare", "--pid", "--fork", "--mount-proc", "sh", "-c", f"{words}; exit $?"]
    done = subprocess.run(inside, env=lab.env, cwd=lab.folder, capture_output=True, text=True, timeout=60)
    found = {check["name"]: check for check in json.loads(done.stdout)}
    assert done.returncode == 1 and "exec" in found["PID 1"]["fix"], done.stderr


def test_a_folder_that_cannot_be_written(lab: Lab) -> None:
    if not Path("/proc/sys").exists() or sys.platform != "linux":
        pytest.skip("needs a folder that nobody can write")
    output = lab.reprieve("doctor", "/proc/sys", "--sample", "16MB", "--json", code=1)
    [disk] = [check for check in json.loads(output.out) if check["name"] == "disk"]
    assert disk["level"] == "bad"
