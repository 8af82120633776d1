"""`reprieve run`: the end of each way to start a job, and exact resumes after a stop."""

from __future__ import annotations

import functools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.run as torchrun

from reprieve.launch.process import descendants
from tests.support.launch_kit import JOB, LIMIT_S, REPRIEVE, Lab, Launched, alive, processes_with, until

STEPS = 40
SOAK = os.environ.get("REPRIEVE_SOAK") == "1"


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return Lab(tmp_path)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], list[Any]]:
    """Return the losses of each rank of an undisturbed job."""

    @functools.cache
    def seen(ranks: int) -> list[Any]:
        return Lab(tmp_path_factory.mktemp("undisturbed")).run_undisturbed(ranks, steps=STEPS)

    return seen


WAYS: dict[str, tuple[int, Callable[[Lab, str], list[str]]]] = {
    "python": (1, lambda lab, options: [sys.executable, JOB, options]),
    "script": (1, lambda lab, options: ["launch_job.py", options]),
    "torchrun 2": (2, lambda lab, options: ["torchrun", "--standalone", "--nproc-per-node=2", JOB, options]),
    "torchrun 3": (3, lambda lab, options: ["torchrun", "--standalone", "--nproc-per-node=3", JOB, options]),
    "accelerate": (1, lambda lab, options: ["accelerate", "launch", "--num_processes=1", "--cpu", JOB, options]),
    "shell": (1, lambda lab, options: ["bash", "-c", f"{sys.executable} {JOB} '{options}'; exit $?"]),
}


@pytest.mark.soak
@pytest.mark.parametrize("way", [way for way in WAYS if SOAK or way != "torchrun 3"])
def test_stopped_and_started_again(lab: Lab, way: str, undisturbed: Callable[[int], list[Any]]) -> None:
    """143, then 0, and every loss as in an undisturbed run."""
    ranks, command = WAYS[way]
    shutil.copy(JOB, lab.folder)
    words = command(lab, lab.options(steps=STEPS, step_s=0.05))
    launched = lab.start(words)
    until(lambda: lab.steps() >= 3, launched)
    launched.terminate()
    ended = launched.wait()
    assert ended.code == 143, str(ended)
    stopped_at = lab.steps()
    assert f"saved at step {stopped_at}" in lab.exit_message() and lab.exit_message() in ended.err, str(ended)
    assert ended.err.endswith(f"reprieve: {lab.exit_message()}\n"), "the line that matters is the last"
    assert ended.err.count("reprieve: saved step") == ended.err.count("saved step") == 1, "once, not once a rank"
    assert "Traceback" not in ended.err, str(ended)
    one = lab.only_run()
    assert (one["state"], one["step"], one["checkpoint_step"]) == ("preempted", stopped_at, stopped_at)
    assert not processes_with(str(lab.job))

    ended = lab.run(words)
    assert ended.code == 0, str(ended)
    resumed = f"reprieve: resuming from checkpoint-{stopped_at} (step {stopped_at}) in job/checkpoints\n"
    assert ended.err.count(resumed) == ended.err.count("resum") == 1, str(ended)
    one = lab.only_run()
    assert (one["state"], one["step"], one["done"], one["attempts"]) == ("finished", STEPS, 1.0, 2)
    assert one["time"]["wall"] == pytest.approx(one["time"]["trained"] + sum(one["time"]["lost"].values()))
    assert {"first start", "preempted"} <= one["time"]["lost"].keys()
    for rank in range(ranks):
        assert [step for step, _ in lab.seen(rank)] == list(range(1, STEPS + 1))

    assert undisturbed(ranks) == [lab.seen(rank) for rank in range(ranks)]


def test_one_of_two_nodes_is_told(lab: Lab) -> None:
    """All ranks on both stop at one step, both launchers end with 143; torchrun does not restart them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    nodes = [
        [
            "--nnodes=2", f"--node-rank={node}", "--master-addr=127.0.0.1", f"--master-port={port}", "--max-restarts=3",
        ]
        for node in range(2)
    ]  # fmt: skip
    for attempt, width in enumerate((16, 16, 8)):
        launched = [lab.start(lab.torchrun(1, *words, steps=STEPS, step_s=0.1, width=width)) for words in nodes]
        if attempt == 0:
            until(lambda: lab.steps(0) >= 3 and lab.steps(1) >= 3, limit_s=LIMIT_S)
            launched[1].terminate()
        ended = [one.wait() for one in launched]
        assert [one.code for one in ended] == [[143, 143], [0, 0], [42, 42]][attempt], "\n\n".join(map(str, ended))
        if attempt == 0:
            assert lab.steps(0) == lab.steps(1) < STEPS
    assert sorted(one["step"] for one in lab.status()) == [0, 0, STEPS, STEPS]


def test_a_checkpoint_of_another_model_needs_a_person(lab: Lab) -> None:
    assert lab.run(lab.python(steps=3)).code == 0
    for way in ("python", "torchrun 3", "accelerate"):
        ended = lab.run(WAYS[way][1](lab, lab.options(steps=5, width=8)), "--max-restarts", "3")
        assert ended.code == 42, f"{way}: {ended}"
        assert "permanent failure, restarting will not help: StateMismatch" in lab.exit_message()
    bare = subprocess.run(lab.python(steps=5, width=8), env=lab.env, capture_output=True, text=True, timeout=60)
    assert bare.returncode == 42, bare.stderr


def test_nothing_valid_to_resume_from_needs_a_person(lab: Lab) -> None:
    assert lab.run(lab.python(steps=3)).code == 0
    for path in lab.job.glob("checkpoints/checkpoint-*/*.safetensors"):
        path.write_bytes(path.read_bytes()[:-100] + bytes(100))
    ended = lab.run(lab.python(steps=5), "--max-restarts", "3")
    assert ended.code == 42, str(ended)
    assert "permanent failure, restarting will not help: NoValidCheckpoint" in lab.exit_message()
    assert lab.run(lab.python(steps=5), "--fresh").code == 0


def test_a_failure_is_the_commands_own(lab: Lab) -> None:
    """python passes on the exit code; torchrun and accelerate have their own code for all failures of a rank."""
    for way, code in (("python", 1), ("torchrun 2", 1), ("accelerate", 1)):
        ended = lab.run(WAYS[way][1](lab, lab.options(steps=5, crash_at=2)))
        assert ended.code == code, f"{way}: {ended}"
        assert lab.exit_message() == "failed with exit code 1 at step 2"
    assert lab.run([sys.executable, "-c", "raise SystemExit(7)"]).code == 7


def test_as_the_first_process_of_a_namespace(lab: Lab) -> None:
    """Its job starts a process that starts a process: no zombie, no orphan, the right code."""
    if os.geteuid() != 0:
        pytest.skip("a PID namespace needs root")
    job = lab.python(steps=400, step_s=0.05, children=True)
    launched = Launched(lab, ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", *REPRIEVE, "run", *job])
    until(lambda: lab.steps() >= 3, launched)
    ours = descendants(launched.pid)
    [first] = [pid for pid in ours if _stat(pid)[1] == str(launched.pid)]
    assert len(ours) >= 3  # the launcher, the job, and what it has left behind
    until(lambda: not _zombies(first), launched)
    os.kill(first, signal.SIGTERM)
    ended = launched.wait()
    assert ended.code == 143, str(ended)
    assert f"saved at step {lab.steps()}" in ended.err
    assert not [pid for pid in ours if alive(pid)]


@pytest.mark.skipif(
    "TORCH_ELASTIC_SHUTDOWN_TIMEOUT" not in Path(torchrun.__file__).read_text(),
    reason="the torchrun of this torch kills after 30 s, regardless of the setting",
)
def test_torchrun_waits_for_a_save_of_more_than_30_seconds(lab: Lab) -> None:
    """The launcher sets torchrun's timeout to the grace period."""
    launched = lab.start(lab.torchrun(2, steps=1000, step_s=0.05, width=190_000, slow=300_000), "--grace-period", "2m")
    until(lambda: lab.steps() >= 3, launched)
    launched.terminate()
    stopped_at = time.monotonic()
    ended = launched.wait()
    assert ended.code == 143 and f"saved at step {lab.steps()}" in lab.exit_message(), str(ended)
    assert 30 < time.monotonic() - stopped_at < 60


def test_a_launcher_that_is_killed_stops_its_job(lab: Lab) -> None:
    launched = lab.start(lab.python(steps=1000, step_s=0.05))
    until(lambda: lab.steps() >= 3, launched)
    os.kill(launched.pid, signal.SIGKILL)
    launched.wait()
    until(lambda: not processes_with(str(lab.job)))
    stopped_at = lab.steps()
    assert (lab.job / "checkpoints" / f"checkpoint-{stopped_at}").is_dir()
    assert lab.only_run()["state"] == "lost"


def test_explain_says_what_comes_from_where(lab: Lab) -> None:
    lab.env["CHECKPOINT_MAX_RETAIN"] = "7"
    shown = lab.reprieve("run", "--explain", "--grace-period", "2m", "train.py").out
    rows = {line.split()[0]: line.split()[1:3] for line in shown.splitlines()}
    assert rows["grace-period"] == ["120s", "--grace-period"]
    assert rows["keep"] == ["7", "CHECKPOINT_MAX_RETAIN"]
    assert rows["every"] == ["10m", "default"]


def test_what_was_said_arrives_in_the_script(lab: Lab) -> None:
    script = lab.folder / "train.py"
    script.write_text(
        "import reprieve, torch, json\n"
        "run = reprieve.Run(model=torch.nn.Linear(2, 2), notices='off')\n"
        "schedule, kept = run.checkpointer.schedule, run.checkpointer.retention\n"
        "print(json.dumps([str(run.checkpointer.root), schedule.steps, kept.keep, run.checkpointer.run_name]))\n"
        "run.finish()\n"
    )
    ended = lab.run(["train.py"], "--checkpoints", "my checkpoints", "--every", "7", "--keep", "2", "--name", "mine")
    assert ended.code == 0, str(ended)
    assert json.loads(ended.out) == [str(lab.folder / "my checkpoints"), 7, 2, "mine"]
    assert lab.only_run()["name"] == "mine"


def _zombies(parent: int) -> list[int]:
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return [pid for pid in pids if _stat(pid)[:2] == ["Z", str(parent)]]


def _stat(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ["X", "0"]
