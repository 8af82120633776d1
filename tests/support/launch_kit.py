"""`reprieve run` and its sister commands as real processes, over the script in launch_job.py."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from reprieve.launch.process import descendants
from reprieve.testing import run_ranks, values
from tests.support.jobs import launch_job
from tests.support.places import HIDE_OPTIONAL, JOBS

JOB = str(JOBS / "launch_job.py")
REPRIEVE = [sys.executable, "-m", "reprieve"]
LIMIT_S = 120
_launched: list[subprocess.Popen[str]] = []


class Lab:
    """A folder for a job, and a state folder for the runs of one test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.job = folder / "job"
        self.job.mkdir()
        self.env = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("REPRIEVE", "CHECKPOINT"))},
            "REPRIEVE_STATE_DIR": str(folder / "state"),
            "REPRIEVE_TERMINATION_LOG": str(folder / "exit-message"),
            "OMP_NUM_THREADS": "1",
            **HIDE_OPTIONAL,
        }
        (folder / "exit-message").touch()

    def options(self, **options: Any) -> str:
        return json.dumps({"folder": str(self.job), **options})

    def python(self, **options: Any) -> list[str]:
        return [sys.executable, JOB, self.options(**options)]

    def torchrun(self, ranks: int, *words: str, **options: Any) -> list[str]:
        head = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            f"--nproc-per-node={ranks}",
            *(words or ("--standalone",)),
        ]
        return [*head, JOB, self.options(**options)]

    def start(self, command: Sequence[str], *before: str, **popen: Any) -> Launched:
        """Start `reprieve run BEFORE… COMMAND…`."""
        return Launched(self, [*REPRIEVE, "run", *before, *command], **popen)

    def run(self, command: Sequence[str], *before: str, **popen: Any) -> Ended:
        return self.start(command, *before, **popen).wait()

    def run_undisturbed(self, ranks: int = 1, **options: Any) -> list[Any]:
        """Run the job to its end in forks, without a launcher. Returns what each rank has seen."""
        values(run_ranks(ranks, launch_job.main, launch_job.Options(folder=str(self.job), **options), backend=None))
        return [self.seen(rank) for rank in range(ranks)]

    def reprieve(self, *words: str, code: int | None = 0) -> Ended:
        ended = Launched(self, [*REPRIEVE, *words]).wait()
        assert code is None or ended.code == code, str(ended)
        return ended

    def status(self, name: str | None = None) -> Any:
        """Return the output of `reprieve status --json`."""
        return json.loads(self.reprieve("status", *([name] if name else []), "--json").out)

    def only_run(self) -> dict[str, Any]:
        [run] = self.status()
        return dict(run)

    def seen(self, rank: int = 0) -> list[Any]:
        """Return the steps and losses of a rank. A repeated step counts once, and its loss must be the same."""
        path = self.job / f"seen-{rank}.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        found: dict[int, Any] = {}
        for step, loss in lines:
            assert found.setdefault(step, loss) == loss, f"step {step} was repeated with another loss"
        return [[step, found[step]] for step in sorted(found)]

    def steps(self, rank: int = 0) -> int:
        return len(self.seen(rank))

    def last_step(self, rank: int = 0) -> int:
        """Return the last step of a rank, whether or not it was repeated."""
        path = self.job / f"seen-{rank}.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return int(json.loads(lines[-1])[0]) if lines else 0

    def weights(self, step: int) -> bytes:
        """Return the weights that the checkpoint of a step holds."""
        return (self.job / "checkpoints" / f"checkpoint-{step}" / "model.safetensors").read_bytes()

    def termination(self) -> dict[str, Any]:
        """Return the content of the termination log."""
        return dict(json.loads((self.folder / "exit-message").read_text()))

    def exit_message(self) -> str:
        """Return the launcher's exit message, which is in the termination log."""
        return str(self.termination()["message"])


class Ended:
    """How a command ended."""

    def __init__(self, code: int, out: str, err: str, seconds: float) -> None:
        self.code = code
        self.out = out
        self.err = err
        self.seconds = seconds

    def __str__(self) -> str:
        return f"exit code {self.code} after {self.seconds:.1f} s\n--- stdout\n{self.out}\n--- stderr\n{self.err}"


class Launched:
    """A running command."""

    def __init__(self, lab: Lab, words: Sequence[str], **popen: Any) -> None:
        self._began = time.monotonic()
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "env": lab.env, "cwd": lab.folder, **popen}
        self.process = subprocess.Popen(list(words), text=True, start_new_session=True, **options)
        _launched.append(self.process)

    @property
    def pid(self) -> int:
        return self.process.pid

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def wait(self, limit_s: float = LIMIT_S) -> Ended:
        try:
            out, err = self.process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            out, err = self.process.communicate()
            raise AssertionError(f"still running after {limit_s} s\n{out}\n{err}") from None
        return Ended(self.process.returncode, out or "", err or "", time.monotonic() - self._began)


def until(true: Callable[[], object], launched: Launched | None = None, limit_s: float = LIMIT_S) -> None:
    end = time.monotonic() + limit_s
    while not true():
        if launched is not None and launched.process.poll() is not None:
            raise AssertionError(f"the command has ended\n{launched.wait()}")
        assert time.monotonic() < end, "timed out"
        time.sleep(0.02)


def end_what_still_runs() -> None:
    """Kill every command that a test has started and not waited for, with all its descendants."""
    while _launched:
        process = _launched.pop()
        if process.poll() is None:
            for pid in descendants(process.pid) | {process.pid}:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.communicate()


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def processes_with(text: str) -> list[int]:
    """Return the processes whose command line contains the text."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                words = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if text.encode() in words and alive(int(entry.name)):
                found.append(int(entry.name))
    return found
