"""SIGKILL before every single change that a job makes to the disk, in saves and in retention passes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.places import ROOT


@pytest.mark.parametrize("half", [0, 1])
def test_a_kill_before_any_change_to_the_disk_loses_nothing(half: int, tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "tests.support.jobs.kill_worker", str(tmp_path), str(half), "2"],
        cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=280, check=True,
    )  # fmt: skip
    results = [json.loads(line) for line in run.stdout.splitlines()]
    assert [result for result in results if "broken" in result] == []
    *killed, last = results
    assert all(os.WTERMSIG(result["status"]) == signal.SIGKILL for result in killed)
    assert last["status"] == 0 and last["newest"] == 4, "the last child is not killed and finishes"
    assert len(killed) > 40
    verbs = {"create", "write", "flush", "flush_folder", "rename", "exchange", "remove", "remove_folder"}
    assert verbs <= {result["before"] for result in killed}
    assert {result["returned"] for result in killed} == {0, 1, 2, 3, 4}
