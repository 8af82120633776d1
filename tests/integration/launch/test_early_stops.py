"""SIGTERM to a process of a job that does not train yet: always a stop, at any time. A crash is a failure."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from tests.support.launch_kit import Lab, Launched, processes_with, until
from tests.support.places import HIDE_DEEPSPEED, JOBS

SCRIPT = str(JOBS / "early_job.py")


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return Lab(tmp_path)


def command(lab: Lab, way: str, moment: str) -> list[str]:
    job = [SCRIPT, str(lab.job), moment]
    if way == "torchrun":
        return ["torchrun", "--standalone", "--nproc-per-node=2", "--max-restarts=3", *job]
    if way == "accelerate":
        return ["accelerate", "launch", "--num_processes=1", "--cpu", *job]
    return [sys.executable, *job]


def started_rank(lab: Lab, rank: int, launched: Launched) -> int:
    """Return the process of a rank, as soon as it runs Python."""
    found: list[int] = []

    def look() -> bool:
        for pid in processes_with(str(lab.job)):  # not those of a test beside this one
            try:
                if f"RANK={rank}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                    found.append(pid)
            except OSError:
                continue
        return bool(found)

    until(look, launched)
    return found[0]


@pytest.mark.parametrize(
    ("way", "rank", "moment"),
    [
        ("torchrun", 0, "exec"),
        ("torchrun", 1, "import"),
        ("torchrun", 1, "ready"),
        ("python", 0, "import"),
        ("python", 0, "ready"),
        ("accelerate", 0, "import"),
        ("accelerate", 0, "ready"),
    ],
)
def test_sigterm_to_one_process_is_a_stop(lab: Lab, way: str, rank: int, moment: str) -> None:
    """Neither `--max-restarts` nor torchrun's `--max-restarts` starts it again, and no traceback is shown."""
    launched = lab.start(command(lab, way, "import" if moment == "exec" else moment), "--max-restarts", "2")
    if moment == "exec":
        pid = started_rank(lab, rank, launched)
    else:
        note = lab.job / f"pid-{rank}"
        until(note.exists, launched)
        pid = int(note.read_text())
    os.kill(pid, signal.SIGTERM)
    ended = launched.wait()
    assert ended.code == 143, str(ended)
    run = lab.only_run()
    assert (run["state"], run["restarts"], run["attempts"]) == ("preempted", 0, 1)
    assert lab.exit_message().startswith("stopped by SIGTERM")
    assert "Traceback" not in ended.err, str(ended)


@pytest.mark.parametrize("moment", ["map", "run map"])
def test_helpers_of_datasets_may_die_of_the_stop(lab: Lab, moment: str) -> None:
    """`map(num_proc=2)` in set-up, and SIGTERM to all processes of the job, as torchrun and pods send it."""
    lab.env |= HIDE_DEEPSPEED  # and nothing else: it needs datasets
    launched = lab.start(command(lab, "python", moment), "--max-restarts", "2")
    until(lambda: all((lab.job / f"helper-{number}").exists() for number in range(2)), launched)
    for pid in processes_with(str(lab.job)):
        if pid != launched.pid:
            os.kill(pid, signal.SIGTERM)
    ended = launched.wait()
    assert ended.code == 143, str(ended)
    assert lab.only_run()["state"] == "preempted"
    assert lab.exit_message().startswith("stopped by SIGTERM")
    assert not processes_with(str(lab.job)), "no helper is left behind"


def test_sigterm_to_torchrun_alone_is_a_stop(lab: Lab) -> None:
    launched = lab.start(command(lab, "torchrun", "ready"), "--max-restarts", "2")
    until((lab.job / "pid-1").exists, launched)
    rank = int((lab.job / "pid-1").read_text())
    parent = Path(f"/proc/{rank}/stat").read_text().rpartition(")")[2].split()[1]
    os.kill(int(parent), signal.SIGTERM)
    ended = launched.wait()
    assert (ended.code, lab.only_run()["state"]) == (143, "preempted"), str(ended)


def test_a_stop_before_the_first_step_names_what_the_next_start_resumes_from(lab: Lab) -> None:
    """No checkpoint is there, then one, and then the launcher does not know where checkpoints are."""
    start = "the next start begins at step 0"
    for option, moment, expected in (
        ((), "run", f"there was nothing to save. There is no checkpoint in job/checkpoints: {start}"),
        (("--checkpoints", "job/checkpoints"), "import", "resumes from checkpoint-3 (step 3) in job/checkpoints"),
        ((), "import", "are saved at a stop (docs/run.md)"),
    ):
        launched = lab.start(command(lab, "python", moment), *option)
        until((lab.job / "pid-0").exists, launched)
        launched.terminate()
        ended = launched.wait()
        assert ended.code == 143 and lab.exit_message().endswith(expected), str(ended)
        assert "is not protected" not in ended.err
        (lab.job / "pid-0").unlink()
        if not list(lab.job.glob("checkpoints/checkpoint-*")):
            assert lab.run(lab.python(steps=3)).code == 0


def test_a_loop_that_reports_no_steps_is_not_called_untrained(lab: Lab) -> None:
    """A `Checkpointer` saves when its loop requests it, not at a stop: what followed the last save is lost."""
    launched = lab.start(command(lab, "python", "checkpointer"), "--checkpoints", "job/checkpoints")
    until((lab.job / "pid-0").exists, launched)
    launched.terminate()
    ended = launched.wait()
    assert ended.code == 143, str(ended)
    assert lab.exit_message() == (
        "stopped by SIGTERM before a protected training had begun: nothing was saved at the stop. "
        "The next start resumes from checkpoint-1 (step 1) in job/checkpoints"
    )


@pytest.mark.parametrize(
    ("script", "is_protected"),
    [
        ("import torch, time; time.sleep(1)", False),
        ("import reprieve, torch, time; time.sleep(1); reprieve.Run('c', model=torch.nn.Linear(2, 2)).finish()", True),
        ("import torch, time; time.sleep(1)\nfrom reprieve import Checkpointer\nCheckpointer('c', x={})", True),
        ("import torch, time; time.sleep(1)\nif 0:\n  from transformers import Trainer\nraise SystemExit(3)", True),
    ],
)
def test_what_is_said_long_before_training_begins_is_true(lab: Lab, script: str, is_protected: bool) -> None:
    """The launcher waits for a while after `import torch`, here for 0.3 s."""
    (lab.folder / "train.py").write_text(script)
    launch = (
        "import sys, reprieve.launch.launcher as launcher; from reprieve.cli import execute\n"
        "launcher._UNPROTECTED_AFTER_S = 0.3; sys.exit(execute(['run', 'train.py']))"
    )
    ended = Launched(lab, [sys.executable, "-c", launch]).wait()
    assert ended.code in (0, 3), str(ended)
    assert ended.err.count("this script is not protected") == (0 if is_protected else 1), str(ended)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_any_other_signal_to_a_rank_is_a_failure(lab: Lab, number: int) -> None:
    """torchrun then ends the other rank with SIGTERM: that is not a stop."""
    words = command(lab, "torchrun", "import")
    words.remove("--max-restarts=3")
    launched = lab.start(words)
    until(lambda: all((lab.job / f"pid-{rank}").exists() for rank in range(2)), launched)
    os.kill(int((lab.job / "pid-1").read_text()), number)
    ended = launched.wait()
    assert (ended.code, lab.only_run()["state"]) == (1, "failed"), str(ended)


def test_a_crash_is_a_failure_though_the_others_report_a_stop(lab: Lab) -> None:
    """The rank that has a `reprieve.Run` gets torchrun's SIGTERM, and reports that it stops."""
    words = command(lab, "torchrun", "crash")
    words.remove("--max-restarts=3")
    ended = lab.run(words)
    assert (ended.code, lab.only_run()["state"]) == (1, "failed"), str(ended)
    assert "RuntimeError: this rank fails" in ended.err and "ChildFailedError" in ended.err
