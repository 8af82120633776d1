"""Runs on Ray as people start them: the proposal's example, the launcher, a Trainer, other backends."""

from __future__ import annotations

import json
import os
import re
import signal
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
        "200",
        "5",
        *(["LINE"] if line else []),
    ]
    driver = lab.start_command(command)
    lab.until(lambda: any(3 in each for each in epochs(lab.folder)), "epoch 3", during=driver)
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
    assert first[0] == 0 and len(second) == 5
    assert second[0] == first[-1] + 1, "nothing is lost"
    assert line or first[-1] % 10 == 0, "without the line, it stops at its own next checkpoint"
    assert "SIGTERM received, initiating JIT checkpoint in 3.0s" in ended.output
    completed = re.search(r"JIT checkpoint completed in \d+\.\d+s: step (\d+), (\S+)", ended.output)
    assert completed is not None and int(completed[1]) == first[-1], str(ended)
    assert Path(completed[2], "model.pt").exists()
    assert lab.failures_counted() == 0


def test_a_stopped_driver_is_a_preempted_run_for_the_launcher(lab: RayLab) -> None:
    """`reprieve pause` and `reprieve status`, before, during and after; nothing behind `fit()` runs."""
    state = {**lab.env, "XDG_STATE_HOME": str(lab.folder / "state")}

    def reprieve(*arguments: str) -> str:
        command = [sys.executable, "-m", "reprieve", *arguments]
        return subprocess.run(command, env=state, capture_output=True, text=True, timeout=120, cwd=lab.folder).stdout

    driver = lab.start(*REPRIEVE_RUN, env=state, steps=1000, step_s=0.1, stop_save_s=10)
    lab.wait_for_step(5)

    def has_state(state: str) -> bool:
        return bool(json.loads(reprieve("status", "--json", "on-ray"))["state"] == state)

    lab.until(lambda: has_state("running"), "the state is running", during=driver)
    pause = subprocess.Popen([sys.executable, "-m", "reprieve", "pause", "on-ray"], env=state, cwd=lab.folder)
    lab.until(lambda: has_state("stopping"), "the run is stopping", during=driver)
    ended = lab.wait(driver)
    assert ended.code == 143, str(ended)
    assert pause.wait(60) == 0
    assert not (lab.folder / "result").exists(), "code after fit() ran"
    assert "Traceback" not in re.sub(r".*PlacementGroupCleaner.*", "", ended.output), "a stop is no error"
    paused = json.loads(reprieve("status", "--json", "on-ray"))
    assert (paused["state"], paused["step"]) == ("paused", lab.steps()[-1]), paused
    steps = lab.steps()[-1] + 5
    ended = lab.wait(lab.start(*REPRIEVE_RUN, env=state, steps=steps))
    assert ended.code == 0, str(ended)
    lab.assert_nothing_lost(steps, 2)
    assert json.loads(reprieve("status", "--json", "on-ray"))["state"] == "finished"


def test_the_environment_protects_a_script_that_stays_as_it_is(lab: RayLab) -> None:
    """Its driver too: nothing behind `fit()` runs, and the progress file lives through both drivers' workers.

    The driver has trained another run before, whose controller is gone. The save takes longer than the guard of that
    run would try to reach it."""
    progress = lab.folder / "progress.json"
    env = {"RAY_TRAIN_CALLBACKS": "reprieve.ray.JITCheckpointCallback", "TRAINING_PROGRESS_FILE": str(progress)}
    options = {"steps": 1000, "step_s": 0.1, "every": 1000, "stop_save_s": 6, "fit_before": True}
    driver = lab.start(env=env, protection="environment", **options)
    lab.wait_for_step(5)
    os.kill(driver.pid, signal.SIGTERM)
    ended = lab.wait(driver)
    assert ended.code == 143, str(ended)
    assert not (lab.folder / "result").exists(), "code after fit() ran"
    assert json.loads(progress.read_text())["state"] == "stopped"
    done = lab.steps()[-1]
    plan = [{"at": "forward", "step": done + 2, "target": "rank 0"}]
    ended = lab.run(env=env, protection="environment", steps=done + 50, step_s=0.1, every=1000, plan=plan)
    assert ended.code == 0, str(ended)
    lab.assert_nothing_lost(done + 50, 2)
    content = json.loads(progress.read_text())
    assert (content["state"], content["restarts"]) == ("finished", 1), content
    assert content["resumedFromStep"] == lab.starts()[-1] - 1, content
    assert lab.failures_counted() == 0


def test_a_transformers_trainer_is_stopped_three_times(lab: RayLab) -> None:
    """With the callbacks of Ray's documentation and DataLoader workers: losses and weights are exact."""
    undisturbed = lab.another("undisturbed")
    for run, plan in ((undisturbed, []), (lab, [3, 8, 14])):
        (run.folder / "plan").write_text(json.dumps(plan))
        command = [sys.executable, "-m", "tests.support.jobs.ray_trainer", str(run.folder), "20"]
        ended = run.wait(run.start_command(command))
        assert ended.code == 0, str(ended)
    assert "RayTrainReportCallback is removed" in lab.output()
    assert len(lab.completed()) == 3, lab.output()[-6000:]
    losses = [(run.folder / "losses").read_text() for run in (undisturbed, lab)]
    assert losses[0] == losses[1]
    weights = [torch.load(run.folder / "model.pt") for run in (undisturbed, lab)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert lab.failures_counted() == 0


def test_workers_without_torch_distributed_agree_on_one_step(lab: RayLab) -> None:
    """Backends other than torch's set no rank in the environment. `preemption_grace_s` does not delay the restart."""
    plan = [{"at": "forward", "step": 4, "target": "rank 1"}]
    ended = lab.run(steps=10, plan=plan, backend="none", preemption_grace_s=600)
    assert ended.code == 0, str(ended)
    assert [lab.starts(rank) for rank in range(2)] == [lab.starts(0)] * 2
    assert lab.steps(0) == lab.steps(1) == list(range(10)), str(ended)
    stopped = next(row["at"] for row in lab.lines(0) if "disruption" in row)
    restarted = [row["at"] for row in lab.lines(0) if "started" in row][1]
    assert restarted - stopped < 300, "the restart has waited for preemption_grace_s"
