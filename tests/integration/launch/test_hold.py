"""`reprieve hold` as the first process of a PID namespace, beside processes that enter it as `kubectl exec` does."""

from __future__ import annotations

import os
import pty
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import pytest

from reprieve.launch.process import descendants
from tests.support.launch_kit import REPRIEVE, Ended, Lab, Launched, until

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("nsenter") is None, reason="a PID namespace needs root, unshare and nsenter"
)
OTHER_USER = "54321"
LOG = "log"


class Container:
    """A PID namespace whose first process is `reprieve hold`."""

    def __init__(self, lab: Lab, *options: str, uid: str = "0") -> None:
        self.lab = lab
        self.entered: list[subprocess.Popen[str]] = []
        user = ["setpriv", "--reuid", uid, "--clear-groups"] if uid != "0" else []
        namespace = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
        with (lab.folder / "hold").open("w") as messages:
            self.launched = Launched(lab, [*namespace, *user, *REPRIEVE, "hold", *options], stderr=messages)
        until(lambda: "ready for commands" in self.said(), self.launched)
        [self.pid] = descendants(self.launched.pid)

    def said(self) -> str:
        return (self.lab.folder / "hold").read_text()

    def exec(self, command: Sequence[str], *, output: IO[str] | int | None = None) -> subprocess.Popen[str]:
        """Start a command as `kubectl exec` does: in the namespace, and not as a child of the first process."""
        enter = ["nsenter", f"--target={self.pid}", "--pid", "--mount", f"--wd={self.lab.folder}"]
        process = subprocess.Popen([*enter, *command], text=True, stdout=output, stderr=output, env=self.lab.env)
        self.entered.append(process)
        return process

    def shell(self, script: str) -> subprocess.Popen[str]:
        """Run a script that prints `ready`, and return when it has."""
        with (self.lab.folder / LOG).open("w") as output:
            process = self.exec(["bash", "-c", script], output=output)
        until(lambda: "ready" in self.log())
        return process

    def log(self) -> str:
        return (self.lab.folder / LOG).read_text()

    def stop(self) -> Ended:
        os.kill(self.pid, signal.SIGTERM)
        ended = self.launched.wait(60)
        for process in self.entered:
            process.wait(60)
        return ended


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return Lab(tmp_path)


def python(script: str) -> str:
    return f'{sys.executable} -c "{script}"'


def test_a_torchrun_in_the_background_saves_and_the_next_one_resumes(lab: Lab) -> None:
    """Its ranks get SIGTERM twice: from `reprieve hold` and from torchrun."""
    torchrun = " ".join(f"'{word}'" for word in lab.torchrun(2, steps=60, step_s=0.5))
    container = Container(lab, "--grace-period", "60s")
    started = container.exec(["bash", "-c", f"nohup {torchrun} > {LOG} 2>&1 &"])
    assert started.wait() == 0, "the shell has ended before its torchrun"
    until(lambda: lab.steps(0) >= 3 and lab.steps(1) >= 3)
    assert container.stop().code == 143, container.said()
    stopped_at = lab.steps()
    assert lab.steps(1) == stopped_at < 60
    assert (lab.job / f"checkpoints/checkpoint-{stopped_at}").is_dir(), container.log()
    assert lab.exit_message() == "stopped by SIGTERM: nothing runs any more"

    (lab.job / "hurry").touch()
    container = Container(lab)
    assert container.exec(["bash", "-c", f"{torchrun} > {LOG} 2>&1"]).wait() == 0, container.log()
    assert f"resuming from checkpoint-{stopped_at}" in container.log()
    assert container.stop().code == 143
    undisturbed = Lab(lab.folder / "job")
    assert [lab.seen(0), lab.seen(1)] == undisturbed.run_undisturbed(2, steps=60)


def test_orphans_are_reaped(lab: Lab) -> None:
    container = Container(lab)
    assert container.exec(["sh", "-c", "(sleep 0.2; exit 3) & (sleep 0.2; exit 4) &"]).wait() == 0
    until(lambda: not Path(f"/proc/{container.pid}/task/{container.pid}/children").read_text())
    assert container.stop().code == 143
    assert "passed on to no process" in container.said()


def test_a_process_that_ignores_sigterm_does_not_outlast_the_grace_period(lab: Lab) -> None:
    container = Container(lab, "--grace-period", "1.5s")
    os.setpriority(os.PRIO_PROCESS, container.pid, -20)  # it has a quarter of a second, also on a busy machine
    deaf = container.shell("trap '' TERM; echo ready; sleep 100; sleep 100")
    began = time.time()
    assert container.stop().code == 143
    # When it gave up. Afterwards the interpreter and the namespace end, which takes as long as the machine is busy.
    assert 1.0 < (lab.folder / "hold").stat().st_mtime - began < 1.5
    assert time.time() - began < 10
    assert "bash" in lab.exit_message() and "did not end within the grace period" in lab.exit_message()
    assert deaf.returncode != 0


def test_what_a_save_starts_gets_no_signal(lab: Lab) -> None:
    """A script that copies its results when it is stopped, by a program of its own."""
    container = Container(lab)
    container.shell("trap 'sh -c \"sleep 0.5; echo copied\"; exit' TERM; echo ready; while :; do sleep 0.1; done")
    assert container.stop().code == 143
    assert "copied" in container.log()


def test_a_suspended_process_saves(lab: Lab) -> None:
    container = Container(lab, "--grace-period", "10s")
    container.shell("(trap 'echo saved; exit' TERM; echo ready; kill -STOP $BASHPID) & wait")
    time.sleep(0.1)
    assert container.stop().code == 143
    assert "saved" in container.log() and "nothing runs any more" in lab.exit_message()


def test_threads_that_outlive_the_main_thread_are_waited_for(lab: Lab) -> None:
    """Such a process looks like a zombie."""
    script = (
        "import ctypes, signal, threading, time; signal.pthread_sigmask(0, [signal.SIGTERM]);"
        " work = lambda: (print('ready', flush=True), signal.sigwait([signal.SIGTERM]), time.sleep(0.5),"
        " print('saved'), ctypes.CDLL(None).exit(0)); threading.Thread(target=work).start(); time.sleep(0.1);"
        " ctypes.CDLL(None).pthread_exit(0)"
    )
    container = Container(lab)
    container.shell(f"PYTHONUNBUFFERED=1 exec {python(script)}")
    time.sleep(0.3)
    assert container.stop().code == 143
    assert "saved" in container.log()


def test_an_idle_shell_does_not_delay_the_end(lab: Lab) -> None:
    """An interactive shell ignores SIGTERM. What runs in it is waited for."""
    container = Container(lab, "--grace-period", "30s")
    main, side = pty.openpty()
    container.exec(["sh", "-c", f"exec setsid --ctty bash --norc -i <{os.ttyname(side)}"], output=side)
    job = "(trap 'sleep 0.5; echo saved > saved; exit' TERM; touch ready; while :; do sleep 0.1; done)"
    os.write(main, f"{job}\n".encode())
    until((lab.folder / "ready").exists)
    began = time.monotonic()
    assert container.stop().code == 143
    assert 0.5 < time.monotonic() - began < 10
    assert (lab.folder / "saved").exists()
    os.close(main)
    os.close(side)


def test_processes_of_other_users_are_not_waited_for(lab: Lab) -> None:
    """They cannot be signalled, so they would take the whole grace period."""
    for folder in (lab.folder, lab.job):
        folder.chmod(0o777)
    if subprocess.run(["setpriv", "--reuid", OTHER_USER, "--clear-groups", *REPRIEVE, "--version"]).returncode:
        pytest.skip("other users may not run this Python")
    container = Container(lab, "--grace-period", "30s", uid=OTHER_USER)
    container.shell("echo ready; sleep 100")
    began = time.monotonic()
    assert container.stop().code == 143
    assert time.monotonic() - began < 10


def test_it_refuses_to_signal_a_whole_machine(lab: Lab) -> None:
    ended = lab.reprieve("hold", code=42)
    assert "first process of a container" in ended.err and 'command: ["reprieve", "hold"]' in ended.err
    shares_pids = subprocess.run(["unshare", "--pid", "--fork", *REPRIEVE, "hold"], capture_output=True, text=True)
    assert shares_pids.returncode == 42, "its /proc shows the processes of another namespace"


def test_a_grace_period_that_cannot_be_parsed(lab: Lab) -> None:
    lab.env["REPRIEVE_GRACE"] = "soon"
    assert "REPRIEVE_GRACE: 'soon'" in lab.reprieve("hold", code=42).err
    assert "REPRIEVE_GRACE: 'soon'" in lab.exit_message()
