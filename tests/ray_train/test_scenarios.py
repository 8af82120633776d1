"""Runs on Ray as people start them: the proposal's example, the launcher, a Trainer, failures, other backends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.ray_lab import RayLab

pytestmark = pytest.mark.timeout(600)

REPRIEVE_RUN = [sys.executable, "-m", "reprieve", "run", "--name", "on-ray", sys.executable]


def epochs(folder: Path, rank: int = 0) -> list[list[int]]:
    """The epochs of each generation."""
    found: list[list[int]] = []
    path = folder / f"epochs-{rank}"
    for line in path.read_text().splitlines() if path.exists() else ():
        if line.startswith("start"):
            found.append([])
        elif line.isdecimal():
            found[-1].append(int(line))
    return found


@pytest.mark.parametrize("line", [True, False], ids=["with the one line", "verbatim"])
def test_the_example_of_the_proposal_runs_as_it_is(lab: RayLab, line: bool) -> None:
    """Under `reprieve run` its imports resolve, and `ps` and `kill` stop a worker as its documentation says."""
    command = [
        *REPRIEVE_RUN,
        "-m",
        "tests.support.jobs.ray_document",
        str(lab.folder),
        "60",
        *(["LINE"] if line else []),
    ]
    driver = lab.start_command(command)
    lab.until(lambda: any(3 in each for each in epochs(lab.folder)), "epoch 3")
    terminal = {**os.environ, "COLUMNS": "200"}
    listed = subprocess.run(
        "ps aux | grep ray::RayTrainWorker", shell=True, env=terminal, capture_output=True, text=True
    ).stdout
    own = next(row.split()[2] for row in (lab.folder / "epochs-1").read_text().splitlines() if row.startswith("start"))
    assert own in [row.split()[1] for row in listed.splitlines()], listed
    subprocess.run(["kill", "-TERM", own], check=True)
    ended = lab.wait(driver)
    assert ended.code == 0, str(ended)
    first, second = epochs(lab.folder)
    assert second[-1] == 59 and first[0] == 0
    assert second[0] == first[-1] + 1, "nothing is lost"
    assert line or first[-1] % 10 == 0, "without the line, it stops at its own next checkpoint"
    assert "SIGTERM received, initiating JIT checkpoint in 3.0s" in ended.output
    assert "JIT checkpoint completed in " in ended.output
    assert lab.failures_counted() == 0


def test_a_stopped_driver_is_a_preempted_run_for_the_launcher(lab: RayLab) -> None:
    """`reprieve pause` and `reprieve status`, before, during and after; nothing behind `fit()` runs."""
    state = {**lab.env, "XDG_STATE_HOME": str(lab.folder / "state")}

    def reprieve(*arguments: str) -> str:
        command = [sys.executable, "-m", "reprieve", *arguments]
        return subprocess.run(command, env=state, capture_output=True, text=True, timeout=120, cwd=lab.folder).stdout

    driver = lab.start(*REPRIEVE_RUN, env=state, steps=60, step_s=0.1, way="run")
    lab.wait_for_step(5)
    lab.until(lambda: json.loads(reprieve("status", "--json", "on-ray"))["state"] == "running", "the state is running")
    reprieve("pause", "on-ray")
    ended = lab.wait(driver)
    assert ended.code == 143, str(ended)
    assert not (lab.folder / "result").exists(), "code after fit() ran"
    paused = json.loads(reprieve("status", "--json", "on-ray"))
    assert (paused["state"], paused["step"]) == ("paused", len(lab.steps())), paused
    ended = lab.wait(lab.start(*REPRIEVE_RUN, env=state, steps=60, way="run"))
    assert ended.code == 0, str(ended)
    lab.assert_nothing_lost(60, 2)
    assert json.loads(reprieve("status", "--json", "on-ray"))["state"] == "finished"


@pytest.mark.parametrize("way", ["should_checkpoint", "run"])
def test_a_killed_worker_costs_one_failure_and_the_steps_since_its_checkpoint(lab: RayLab, way: str) -> None:
    plan = [{"at": "forward", "step": 7, "target": "rank 0 SIGKILL"}]
    ended = lab.run(way=way, steps=12, plan=plan, max_failures=1)
    assert ended.code == 0, str(ended)
    assert lab.starts() == [0, 5], str(ended)
    assert lab.failures_counted() == 1
    assert lab.steps()[-1] == 11


def test_a_transformers_trainer_is_stopped_three_times(lab: RayLab) -> None:
    """With the callbacks of Ray's documentation and DataLoader workers: losses and weights are exact."""
    undisturbed = lab.another("undisturbed")
    for run, plan in ((undisturbed, []), (lab, [3, 8, 14])):
        (run.folder / "plan").write_text(json.dumps(plan))
        command = [sys.executable, "-m", "tests.support.jobs.ray_trainer", str(run.folder), "20"]
        ended = run.wait(run.start_command(command))
        assert ended.code == 0, str(ended)
    assert "RayTrainReportCallback is removed" in lab.output()
    losses = [(run.folder / "losses").read_text() for run in (undisturbed, lab)]
    assert losses[0] == losses[1]
    weights = [torch.load(run.folder / "model.pt") for run in (undisturbed, lab)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert lab.failures_counted() == 0


def test_workers_without_torch_distributed_agree_on_one_step(lab: RayLab) -> None:
    """Backends other than torch's set no rank in the environment. `preemption_grace_s` does not delay the restart."""
    plan = [{"at": "forward", "step": 4, "target": "rank 1"}]
    ended = lab.run(steps=10, plan=plan, backend="none", preemption_grace_s=60)
    assert ended.code == 0, str(ended)
    assert [lab.starts(rank) for rank in range(2)] == [lab.starts(0)] * 2
    assert lab.steps(0) == lab.steps(1) == list(range(10)), str(ended)
    stopped = next(row["at"] for row in lab.lines(0) if "disruption" in row)
    restarted = [row["at"] for row in lab.lines(0) if "started" in row][1]
    assert restarted - stopped < 60, "the restart did not wait for preemption_grace_s"


def test_stopped_functions_leave_nothing_behind(lab: RayLab) -> None:
    """Temporary folders and processes of the function are gone after several stops."""
    plan = [{"at": "upload", "target": f"rank {number % 2}"} for number in range(3)]
    (lab.folder / "tmp").mkdir()
    ended = lab.wait(lab.start(env={**lab.env, "TMPDIR": str(lab.folder / "tmp")}, steps=14, every=3, plan=plan))
    assert ended.code == 0, str(ended)
    assert list(Path("/tmp").glob("reprieve-test-*")) == []
    lab.assert_nothing_lost(14, 2)
    for pid in {row["pid"] for rank in range(2) for row in lab.lines(rank) if "pid" in row}:
        lab.until(lambda pid=pid: not Path(f"/proc/{pid}").exists(), f"worker {pid} is gone")
