"""Faults under `reprieve run`, each with its message and exit code. docs/launch.md lists them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.launch_kit import REPRIEVE, Lab, Launched, processes_with, until


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return Lab(tmp_path)


def test_a_script_that_ignores_the_signal(lab: Lab) -> None:
    """Killed at the deadline, not before it and not after. How long the launcher takes to exit is not measured."""
    script = lab.folder / "deaf.py"
    script.write_text(
        "import signal, time, pathlib\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "while True: pathlib.Path('ready').touch(); time.sleep(0.01)\n"
    )
    launched = lab.start(["deaf.py"], "--grace-period", "2s")
    until((lab.folder / "ready").exists, launched)
    stopped_at = time.time()
    launched.terminate()
    ended = launched.wait()
    assert 1.5 < (lab.folder / "ready").stat().st_mtime - stopped_at < 2.0
    assert ended.code == 143
    assert "the grace period is over and the job still runs: killing it" in ended.err
    assert "It did not end in time and was killed" in lab.exit_message()
    assert not processes_with(str(script))


def test_a_script_that_hangs(lab: Lab) -> None:
    """The launcher shows its stacks, ends it and restarts it."""
    ended = lab.run(lab.python(steps=10, hang_at=5, step_s=0.3, every=2), "--hang-timeout", "2s", "--max-restarts", "1")
    assert ended.code == 137, str(ended)
    assert ended.err.count("the job hangs after step 4") == 2
    assert ended.err.count("_wait_for_ever") >= 2, "the stacks of the rank"
    run = lab.only_run()
    assert (run["state"], run["restarts"], run["attempts"]) == ("hung", 1, 2)
    assert run["time"]["lost"]["hung"] > 2


def test_a_script_that_always_fails_at_one_step(lab: Lab) -> None:
    ended = lab.run(lab.python(steps=10, crash_at=5, every=3), "--max-restarts", "20")
    assert ended.code == 1, str(ended)
    assert ended.err.count("RuntimeError: it always fails at step 5") == 3
    assert "no progress: 3 attempts in a row ended at step 5 or before" in lab.exit_message()
    run = lab.only_run()
    assert (run["state"], run["restarts"], run["attempts"]) == ("failed", 2, 3)


def test_a_script_that_exits_with_0_before_it_has_finished(lab: Lab) -> None:
    ended = lab.run(lab.python(steps=10, leave_at=4), "--max-restarts", "3")
    assert ended.code == 1, str(ended)
    assert "the script ended with 0 at step 4, but its training is not finished" in lab.exit_message()
    assert lab.only_run()["restarts"] == 0


@pytest.mark.parametrize(("ranks", "code"), [(1, 137), (2, 1)])
def test_a_rank_that_is_killed(lab: Lab, ranks: int, code: int) -> None:
    """torchrun prints its own message, and the next start resumes from the last checkpoint."""
    options = {"steps": 12, "kill_at": 8, "every": 3, "step_s": 0.3}
    command = lab.python(**options) if ranks == 1 else lab.torchrun(ranks, **options)
    ended = lab.run(command)
    assert ended.code == code, str(ended)
    assert re.search("at step [78]$", lab.exit_message())
    assert not processes_with(str(lab.job))
    options.pop("kill_at")
    again = lab.run(lab.python(**options) if ranks == 1 else lab.torchrun(ranks, **options))
    assert again.code == 0, str(again)
    assert lab.steps() == 12


@pytest.fixture
def small_memory(tmp_path: Path) -> Iterator[Path]:
    """A cgroup in which a process of 300 MB is killed."""
    for top, limit in (("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")):
        group = Path(top) / f"reprieve-test-{os.getpid()}"
        with contextlib.suppress(OSError):
            group.mkdir()
            if (group / limit).exists():
                (group / limit).write_text(str(200 << 20))
                yield group
                group.rmdir()  # nothing of the launcher is left in it
                return
            group.rmdir()
    pytest.skip("needs root and a memory cgroup")


def test_a_process_that_runs_out_of_memory(lab: Lab, small_memory: Path) -> None:
    """Its parent ends with 1, as torchrun does."""
    script = lab.folder / "hungry.py"
    script.write_text(
        "import os, subprocess, sys\n"
        "if 'child' in sys.argv: taken = bytearray(os.urandom(2**20)) * 300\n"
        "else: sys.exit(subprocess.run([sys.executable, __file__, 'child']).returncode != 0)\n"
    )
    enter = ["sh", "-c", f'echo $$ > {small_memory}/cgroup.procs; exec "$@"', "sh"]
    ended = Launched(lab, [*enter, *REPRIEVE, "run", "hungry.py"]).wait()
    assert ended.code == 1, str(ended)
    assert lab.exit_message().startswith("failed with exit code 1: out of memory, the kernel killed a process"), ended


def test_a_command_that_does_not_exist(lab: Lab) -> None:
    ended = lab.run(["trian", "x"])
    assert ended.code == 127 and "trian: no such command" in ended.err
    ended = lab.run(["train.py"])
    assert ended.code == 127 and "train.py does not exist" in ended.err
    (lab.folder / "data.txt").touch()
    ended = lab.run(["./data.txt"])
    assert ended.code == 126 and "cannot be executed" in ended.err
    assert lab.run([]).code == 2


def test_words_arrive_as_they_were_typed(lab: Lab) -> None:
    folder = lab.folder / "with space"
    folder.mkdir()
    (folder / "train.py").write_text("import json, sys\nprint(json.dumps(sys.argv))\n")
    words = ["a b", "it's", '"quoted"', "größe 数", "--keep", "5", "", "$HOME", "*"]
    ended = lab.run(["with space/train.py", *words], "--keep", "2")
    assert ended.code == 0, str(ended)
    assert json.loads(ended.out) == ["with space/train.py", *words]


def test_stdout_that_nobody_reads(lab: Lab) -> None:
    """Closed at the start or later: the script does not notice, and the log is complete."""
    script = lab.folder / "talk.py"
    script.write_text("import sys\nfor n in range(20_000): print(n)\nprint('done', file=sys.stderr)\n")
    read, write = os.pipe()
    os.close(read)
    for popen in ({"stdout": write}, {"preexec_fn": lambda: os.close(1), "stdout": None}):
        ended = lab.run(["talk.py"], **popen)
        assert ended.code == 0 and "done" in ended.err, str(ended)
        name = lab.only_run()["name"]
        kept = lab.reprieve("logs", name).out.split()
        assert sorted(kept[-20_001:]) == sorted(["done", *map(str, range(20_000))])
    os.close(write)


def test_a_full_disk_for_the_run_record(lab: Lab, tmp_path: Path) -> None:
    """The launcher reports it once, and training continues and finishes."""
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    small = tmp_path / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(small)], check=True)
    try:
        (small / "filler").write_bytes(bytes(60 * 1024))
        lab.env["REPRIEVE_STATE_DIR"] = str(small)
        ended = lab.run(lab.python(steps=5))
    finally:
        subprocess.run(["umount", "-l", str(small)], check=True)
    assert ended.code == 0, str(ended)
    assert ended.err.count("the run record cannot be written: No space left on device") == 1
    assert lab.steps() == 5


def test_a_script_that_is_not_protected_is_told_so_once(lab: Lab) -> None:
    ended = lab.run(lab.python(steps=3, safe=False))
    assert ended.code == 0, str(ended)
    assert ended.err.count("this script is not protected") == 1 and "docs/run.md" in ended.err
    assert "not protected" not in lab.run(["true"]).err
    assert "not protected" not in lab.run(lab.python(steps=3)).err


def test_a_setting_that_is_wrong(lab: Lab) -> None:
    for words in (["--every", "foo"], ["--max-restarts", "many"], ["--grace-period", "soon"], ["--name", "../x"]):
        ended = lab.run(["true"], *words)
        assert ended.code == 42 and words[1] in ended.err, str(ended)
    lab.env["CHECKPOINT_STRATEGY"] = "weekly"
    ended = lab.run(["true"])
    assert ended.code == 42 and "CHECKPOINT_STRATEGY" in ended.err, str(ended)
    lab.env |= {"CHECKPOINT_STRATEGY": "steps", "CHECKPOINT_INTERVAL": "5m"}
    ended = lab.run(["true"])
    assert ended.code == 42 and "CHECKPOINT_STRATEGY=steps" in ended.err and "'5m'" in ended.err, str(ended)


def test_told_to_stop_between_two_attempts(lab: Lab) -> None:
    launched = lab.start([sys.executable, "-c", "raise SystemExit(3)"], "--max-restarts", "9")
    until(lambda: any(run["state"] == "waiting to restart" and run["restarts"] >= 2 for run in lab.status()), launched)
    launched.terminate()
    ended = launched.wait()
    assert ended.code == 143 and "before the next attempt" in ended.err, str(ended)


def test_nothing_outlives_the_command(lab: Lab) -> None:
    """Neither its leftovers nor processes that ignore SIGTERM."""
    marker = f"marker-{os.getpid()}"
    left = f"import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600) # {marker}"
    command = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {left!r}]); time.sleep(0.5)"
    ended = lab.run([sys.executable, "-c", command])
    assert ended.code == 0, str(ended)
    assert not processes_with(marker)


def test_other_signals_go_to_the_command(lab: Lab) -> None:
    script = lab.folder / "listen.py"
    script.write_text(
        "import signal, sys, time, pathlib\n"
        "signal.signal(signal.SIGUSR1, lambda *_: sys.exit(9))\npathlib.Path('ready').touch()\ntime.sleep(60)\n"
    )
    launched = lab.start(["listen.py"])
    until((lab.folder / "ready").exists, launched)
    os.kill(launched.pid, signal.SIGUSR1)
    assert launched.wait().code == 9


def test_the_launcher_does_not_import_torch() -> None:
    code = (
        "import sys; from reprieve.cli import execute\n"
        "code = execute(['run', 'true']); assert code == 0; print('torch' in sys.modules, 'rich' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["False", "False"], done.stderr
