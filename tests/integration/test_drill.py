"""`reprieve drill`: what it foretells is what happens."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from .launch_kit import Lab, until

WIDTH = 400_000
"""About 30 MB of state."""


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return Lab(tmp_path)


def preempted_after(lab: Lab, command: list[str]) -> float:
    """A real preemption, with all the time it needs: seconds until the launcher has ended."""
    launched = lab.start(command, "--grace", "10m")
    before = lab.steps()
    until(lambda: lab.steps() >= before + 3, launched)
    told = time.monotonic()
    launched.terminate()
    assert launched.wait().code == 143
    return time.monotonic() - told


@pytest.mark.parametrize(("ranks", "slow", "grace", "survives"), [(2, None, 30, True), (1, 5_000_000, 2, False)])
def test_it_foretells_a_preemption(lab: Lab, ranks: int, slow: int | None, grace: int, survives: bool) -> None:
    options = {"steps": 2000, "step_s": 0.05, "width": WIDTH if slow else 16, "slow": slow}
    command = lab.torchrun(ranks, **options) if ranks > 1 else lab.python(**options)
    first = preempted_after(lab, command)  # so that there is a checkpoint to start from
    kept = _files(lab.job / "checkpoints")
    steps = lab.steps()

    told = lab.reprieve("drill", "--grace", f"{grace}s", "--json", *command, code=0 if survives else 1)
    report = json.loads(told.out)
    assert report["survives"] is survives and report["ranks"] == ranks
    assert report["equal"] is True, "the state after the start is the one at the stop"
    assert report["step"] > steps, "it went on from a copy of the newest checkpoint"
    parts = report["agreement_s"] + report["save_s"] + report["exit_s"]
    assert parts == pytest.approx(report["needed_s"], abs=0.01)
    assert _files(lab.job / "checkpoints") == kept, "the job's own checkpoints are not touched"
    assert not list(lab.job.glob(".reprieve-drill-*")), "the scratch folder is gone"

    seen = lab.job / "seen-0.jsonl"
    seen.unlink()  # a drill trains, too: what the script writes elsewhere, it writes
    real = preempted_after(lab, command)
    assert report["margin_s"] == pytest.approx(grace - real, rel=0.2), f"the first took {first:.2f} s"
    if not survives:
        assert report["save_s"] > report["agreement_s"] and "faster disk" in " ".join(report["advice"])
        assert "grace period" in " ".join(report["advice"])


def test_the_table(lab: Lab) -> None:
    shown = lab.reprieve("drill", "--grace", "60s", "--steps", "2", *lab.python(steps=500, step_s=0.05))
    for words in ("signal → all ranks at one step", "→ durable", "margin", "state equal, bit for bit", "survives"):
        assert words in shown.out, str(shown)
    assert "the job, to see where its checkpoints are" in shown.err
    assert not (lab.job / "checkpoints").exists()


def test_a_job_that_cannot_be_rehearsed(lab: Lab) -> None:
    told = lab.reprieve("drill", *lab.python(steps=3, safe=False), code=2)
    assert "nothing in this job is protected" in told.err
    told = lab.reprieve("drill", *lab.python(steps=2), code=2)
    assert "before it had trained 3 steps" in told.err
    assert lab.reprieve("drill", "trian", code=127)
    assert "--steps" in lab.reprieve("drill", "--steps", "0", "true", code=2).err


def _files(folder: Path) -> dict[str, tuple[int, int]]:
    return {
        str(path): (path.stat().st_size, path.stat().st_mtime_ns)
        for path in folder.rglob("*") if path.is_file() and os.sep + ".reprieve" + os.sep not in str(path)
    }  # fmt: skip
