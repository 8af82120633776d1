"""`reprieve status`, `pause`, `resume` and `logs`, with a job of two ranks and with other commands."""

from __future__ import annotations

import json
import os
import re
import stat
import time
from pathlib import Path

import pytest

from tests.support.launch_kit import REPRIEVE, Lab, Launched, until

SOAK = bool(os.environ.get("REPRIEVE_SOAK"))


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return Lab(tmp_path)


@pytest.mark.soak
def test_pause_and_resume_again_and_again(lab: Lab) -> None:
    """Two ranks. Exact, and `status` is right at each moment."""
    times, each = (10, 6) if SOAK else (1, 6)
    steps = (times + 1) * 50
    launched = lab.start(lab.torchrun(2, steps=steps, step_s=0.05), "--name", "pausing", "--every", "5")
    for number in range(times):
        before = lab.steps()
        until(lambda before=before: lab.steps() >= before + each, launched)
        until(lambda: lab.status("pausing")["state"] == "running" and lab.status("pausing")["done"])
        running = lab.status("pausing")
        assert running["pid"] == launched.pid and running["attempts"] == number + 1
        assert 0 < running["done"] < 1 and (running["eta_s"] is None or running["eta_s"] > 0)
        output = lab.reprieve("pause", "pausing")
        assert "reprieve resume pausing" in output.err
        assert launched.wait().code == 143
        paused = lab.status("pausing")
        assert (paused["state"], paused["pid"], paused["exit_code"]) == ("paused", None, 143)
        assert paused["step"] == paused["checkpoint_step"] == lab.steps(0) == lab.steps(1)
        launched = Launched(lab, [*REPRIEVE, "resume", "pausing"], cwd="/")
    ended = launched.wait()
    assert ended.code == 0, str(ended)
    finished = lab.status("pausing")
    assert (finished["state"], finished["step"], finished["attempts"]) == ("finished", steps, times + 1)
    assert finished["time"]["lost"]["paused"] > 0 and 0 < finished["time"]["goodput"] < 1
    undisturbed = Lab(_made(lab.folder / "undisturbed")).run_undisturbed(2, steps=steps)
    assert undisturbed == [lab.seen(rank) for rank in range(2)]


def test_a_run_that_nobody_gave_a_name(lab: Lab) -> None:
    launched = lab.start(lab.python(steps=120, step_s=0.05))
    until(lambda: lab.steps() >= 3, launched)
    name = lab.only_run()["name"]
    lab.reprieve("pause", name)
    assert launched.wait().code == 143
    stopped_at = lab.steps()
    again = lab.reprieve("resume", name)
    run = lab.only_run()
    assert (run["name"], run["state"], run["step"], run["attempts"]) == (name, "finished", 120, 2), str(again)
    assert stopped_at < lab.steps() == 120


def test_what_is_stored_of_the_environment(lab: Lab) -> None:
    """The record has all that a resume needs, and no secrets."""
    lab.env |= {"LEARNING_RATE": "0.1", "HF_TOKEN": "hf_abcdefghijklmnop", "PROXY": "http://me:hidden1234@proxy"}
    script = lab.folder / "env.py"
    script.write_text(
        "import json, os\nprint(json.dumps([os.getcwd(), *map(os.environ.get, ('LEARNING_RATE', 'HF_TOKEN'))]))\n"
    )
    assert lab.run(["env.py", "--hub-token", "verysecret99"], "--name", "told").code == 0
    folder = lab.folder / "state" / "runs" / "told"
    text = (folder / "run.json").read_text()
    assert "LEARNING_RATE" in text
    assert not [secret for secret in ("abcdefghijklmnop", "hidden1234", "verysecret99") if secret in text]
    assert stat.S_IMODE((folder / "run.json").stat().st_mode) == 0o600
    refused = lab.reprieve("resume", "told", code=42)
    assert "a secret on its command line" in refused.err

    assert lab.run(["env.py"], "--name", "kept").code == 0
    lab.env |= {"LEARNING_RATE": "99", "HF_TOKEN": "hf_another_one_of_mine"}
    again = lab.reprieve("resume", "kept")
    assert json.loads(again.out) == [str(lab.folder), "0.1", "hf_another_one_of_mine"]
    del lab.env["HF_TOKEN"]
    again = lab.reprieve("resume", "kept")
    assert json.loads(again.out)[2] is None and "HF_TOKEN" in again.err


def test_in_the_background(lab: Lab) -> None:
    started = lab.reprieve("run", "--detach", "--name", "far", *lab.python(steps=1000, step_s=0.05), "--detach", "[b]")
    assert started.out.split() == ["far"]
    assert lab.status("far")["command"][-2:] == ["--detach", "[b]"]
    assert "--detach [b]" in lab.reprieve("status", "far").out
    until(lambda: lab.steps() >= 3)
    assert "is running already" in lab.reprieve("resume", "far", code=42).err
    assert lab.reprieve("pause", "far").code == 0
    again = lab.reprieve("resume", "--detach", "far")
    assert again.out.split() == ["far"]
    until(lambda: lab.steps() >= 6)
    lab.reprieve("pause", "far", "--no-wait")
    until(lambda: lab.status("far")["state"] == "paused")
    assert lab.status("far")["attempts"] == 2


def test_logs(lab: Lab) -> None:
    script = lab.folder / "talk.py"
    script.write_text("import time\nfor n in range(30):\n    print('line', n, flush=True)\n    time.sleep(0.05)\n")
    launched = lab.start(["talk.py"], "--name", "talk")
    until(lambda: "line 3" in lab.reprieve("logs", "talk", code=None).out, launched)
    followed = lab.reprieve("logs", "-f", "talk")
    ended = launched.wait()
    assert followed.out == ended.out == "".join(f"line {n}\n" for n in range(30))
    assert lab.reprieve("logs", "talk", "-n", "1").out == "line 29\n"


def test_names_that_are_not_there(lab: Lab) -> None:
    assert "none was started here yet" in lab.reprieve("pause", "nobody", code=2).err
    assert "no run was started here yet" in lab.reprieve("status").err
    assert json.loads(lab.reprieve("status", "--json").out) == []
    assert lab.run(["true"], "--name", "mine").code == 0
    for verb in ("pause", "logs", "status"):
        assert "Known runs: mine" in lab.reprieve(verb, "nobody", code=2).err
    assert "mine is not running: finished" in lab.reprieve("pause", "mine", code=2).err


def test_the_table(lab: Lab) -> None:
    assert lab.run(lab.python(steps=7), "--name", "short").code == 0
    heading, row = lab.reprieve("status").out.splitlines()
    assert heading.split() == ["run", "state", "step", "done", "left", "checkpoint", "restarts", "goodput"]
    assert re.match(r"short\s+finished\s+7\s+100%\s+step 7, \d+ s ago\s+0\s+\d+%", row), row
    whole = lab.reprieve("status", "short").out
    assert "launch_job.py" in whole and "lost to first start" in whole and "finished after 7 steps" in whole


def test_the_same_command_is_the_same_run(lab: Lab) -> None:
    for _ in range(2):
        assert lab.run(["true"]).code == 0
        time.sleep(0.01)
    assert lab.run(["false"]).code == 1
    assert sorted(run["attempts"] for run in lab.status()) == [1, 2]


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder
