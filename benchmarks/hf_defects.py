"""Thirteen ways in which transformers' own just-in-time checkpoints lose work, with them and under Reprieve.

python -m benchmarks.hf_defects              both, as a table: about 15 minutes
python -m benchmarks.hf_defects --only 3,8   these

Each scenario starts `hf_script`, which does not know Reprieve, with `enable_jit_checkpoint` or under `reprieve run`. It
raises Lost with what went wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
_LIMIT_S = 120.0
_SENTINEL = "checkpoint-is-incomplete.txt"


class Lost(Exception):
    """Work was lost, or a result was wrong."""


@dataclass
class Job:
    """The script, started as often as a scenario needs. `protection` is "stock", "reprieve" or none."""

    protection: str
    folder: Path
    ranks: int = 1
    options: list[str] = field(default_factory=list)
    output: str = ""

    @property
    def ours(self) -> bool:
        return self.protection == "reprieve"

    def start(self, *more: str, ranks: int | None = None) -> subprocess.Popen[str]:
        ranks = ranks or self.ranks
        script = ["-m", "benchmarks.hf_script", str(self.folder), *self.options, *more]
        command = [sys.executable, *script]
        if ranks > 1:
            command = [
                sys.executable,
                "-m",
                "torch.distributed.run",
                f"--nproc-per-node={ranks}",
                "--standalone",
                *script,
            ]
        if self.ours:
            command = [sys.executable, "-m", "reprieve", "run", "--grace-period", "60s", *command]
        elif self.protection == "stock":
            command.append("--jit")
        search_path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        env = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": search_path}
        return subprocess.Popen(
            command,
            cwd=ROOT,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def finish(self, process: subprocess.Popen[str]) -> int:
        """Return its exit code. Its output is kept."""
        try:
            self.output, _ = process.communicate(timeout=_LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            self.output, _ = process.communicate()
            raise Lost("it hung, and had to be killed") from None
        return process.returncode

    def run(self, *more: str, ranks: int | None = None) -> int:
        return self.finish(self.start(*more, ranks=ranks))

    def resumed(self, *more: str, ranks: int | None = None) -> int:
        """Start again. Stock needs `resume_from_checkpoint`."""
        return self.run(*(() if self.ours else ("--resume",)), *more, ranks=ranks)

    def seen(self, rank: int = 0) -> list[dict[str, Any]]:
        path = self.folder / f"seen-{rank}.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}")]

    def step(self, rank: int = 0) -> int:
        return max((line["step"] for line in self.seen(rank) if "step" in line), default=0)

    def wait(self, until: Callable[[], bool], process: subprocess.Popen[str]) -> None:
        end = time.monotonic() + _LIMIT_S
        while not until():
            if process.poll() is not None or time.monotonic() > end:
                self.finish(process)
                raise Lost(f"it ended too early:\n{self.output[-2000:]}")
            time.sleep(0.02)

    def train_until(self, step: int, *more: str) -> subprocess.Popen[str]:
        process = self.start(*more)
        self.wait(lambda: self.step() >= step, process)
        return process

    def stop(self, process: subprocess.Popen[str]) -> int:
        """Send SIGTERM to the process that was started, as a platform does."""
        process.terminate()
        return self.finish(process)

    def checkpoints(self) -> list[int]:
        """The checkpoints that a resume would consider."""
        return sorted(
            int(path.name.partition("-")[2]) for path in self.folder.glob("checkpoint-*") if path.name[11:].isdigit()
        )

    def newest(self) -> Path:
        found = self.checkpoints()
        if not found:
            raise Lost("there is no checkpoint")
        return self.folder / f"checkpoint-{found[-1]}"

    def expect_saved(self) -> None:
        """The last completed step of the last process."""
        if self.checkpoints()[-1:] != [self.step()]:
            raise Lost(f"stopped at step {self.step()}, and there are checkpoints of {self.checkpoints()}")
        if not (self.newest() / "trainer_state.json").exists():
            raise Lost(f"{self.newest().name} is not whole")

    def ranks_of(self, process: subprocess.Popen[str]) -> list[int]:
        """The pids of the training processes, by rank."""
        found: dict[int, int] = {}
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError, KeyError, ValueError):
                words = (path / "cmdline").read_bytes().split(b"\0")
                if b"benchmarks.hf_script" in words and str(self.folder).encode() in words and b"run" not in words:
                    env = dict(one.partition(b"=")[::2] for one in (path / "environ").read_bytes().split(b"\0"))
                    if b"LOCAL_RANK" in env and b"torch.distributed.run" not in words:
                        parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
                        if b"torch.distributed.run" in Path(f"/proc/{parent}/cmdline").read_bytes():
                            found[int(env[b"RANK"])] = int(path.name)
        return [found[rank] for rank in sorted(found)]


# The scenarios


def workers_die(job: Job) -> None:
    """1. torchrun with DataLoader workers: the signal kills these first"""
    job.ranks, job.options = 2, ["--workers", "2", "--step-s", "0.2"]
    job.stop(job.train_until(4))
    job.expect_saved()


def exit_code_says_failure(job: Job) -> None:
    """2. torchrun ends a clean stop with 1, and kills a save after 30 s"""
    job.ranks, job.options = 2, ["--step-s", "0.2"]
    if (code := job.stop(job.train_until(4))) != 143:
        raise Lost(f"exit code {code}: whoever started it takes that for a failure")
    job.expect_saved()


def one_rank_is_told(job: Job) -> None:
    """3. One rank is signalled, the others continue"""
    job.ranks, job.options = 2, ["--step-s", "0.3"]
    process = job.train_until(3)
    os.kill(job.ranks_of(process)[1], signal.SIGTERM)
    job.finish(process)
    job.expect_saved()


def sentinel_is_removed_early(job: Job) -> None:
    """4. A checkpoint looks whole while it is being written"""
    job.options = ["--step-s", "0.2", "--save-s", "3"]
    process = job.train_until(3)
    process.terminate()
    with _watching(job) as seen:
        job.finish(process)
    if seen:
        raise Lost(seen[0])


def incomplete_blocks_resume(job: Job) -> None:
    """5. An incomplete newest checkpoint blocks the resume"""
    job.options = ["--save-steps", "10", "--epochs", "1", "--step-s", "0.05"]
    _run_whole(job)
    torn = job.folder / "checkpoint-99"
    shutil.copytree(job.newest(), torn)
    for name in ("trainer_state.json", "reprieve-manifest.json", "reprieve.json"):
        (torn / name).unlink(missing_ok=True)
    if job.resumed("--epochs", "2") != 0:
        raise Lost(f"the resume failed: {job.output.strip().splitlines()[-1]}")
    steps = [line["step"] for line in job.seen() if "step" in line]
    if len(steps) != len(set(steps)) or max(steps) < 39:
        raise Lost(f"it did not go on from the one before: {steps}")


def missing_optimizer_is_skipped(job: Job) -> None:
    """6. A checkpoint without optimizer state is resumed silently"""
    job.options = ["--save-steps", "10", "--epochs", "1"]
    _run_whole(job)
    (job.newest() / "optimizer.pt").unlink()
    code = job.resumed("--epochs", "2")
    if code == 0 and "optimizer.pt" not in job.output:
        raise Lost("it went on with an empty optimizer, and said nothing")


def resume_is_not_exact(job: Job) -> None:
    """7. A run that was stopped ends with other weights"""
    job.stop(job.train_until(7, "--step-s", "0.2"))
    if job.resumed() != 0:
        raise Lost("the resume failed")
    undisturbed = Job("undisturbed", job.folder.with_name("undisturbed"))
    _run_whole(undisturbed)
    mine, theirs = (json.loads((one.folder / "after-train.json").read_text()) for one in (job, undisturbed))
    if mine != theirs:
        raise Lost(f"the weights add up to {mine['weights']}, undisturbed to {theirs['weights']}")


def script_goes_on(job: Job) -> None:
    """8. After the save the script continues as if training were finished"""
    job.options = ["--step-s", "0.2"]
    code = job.stop(job.train_until(4))
    if (job.folder / "after-train.json").exists():
        raise Lost("the code after train() has run")
    if any("evaluating" in line for line in job.seen()):
        raise Lost("it evaluated, after the save")
    if code != 143:
        raise Lost(f"exit code {code}: finished, says whoever started it")


def rotation_deletes_it(job: Job) -> None:
    """9. The checkpoint that was just saved is deleted by save_total_limit"""
    job.options = ["--limit", "1", "--best", "--step-s", "0.1", "--epochs", "3"]
    job.stop(job.train_until(24))
    job.expect_saved()


def not_in_the_main_thread(job: Job) -> None:
    """10. train() in a thread fails"""
    job.options = ["--in-a-thread", "--step-s", "0.2"]
    job.stop(job.train_until(4))
    job.expect_saved()
    if (job.folder / "after-train.json").exists():
        raise Lost("the code after train() has run")


def deaf_in_evaluations(job: Job) -> None:
    """11. An evaluation is finished first, however long it takes"""
    job.options = ["--prediction-s", "5"]
    process = job.start()
    job.wait(lambda: any("evaluating" in line for line in job.seen()), process)
    told = time.monotonic()
    process.terminate()
    saved: list[float] = []

    def look() -> None:
        while process.poll() is None and not saved:
            if job.step() in job.checkpoints():
                saved.append(time.monotonic() - told)
            time.sleep(0.02)

    looking = threading.Thread(target=look)
    looking.start()
    job.finish(process)
    looking.join()
    if not saved or saved[0] > 6:
        raise Lost(f"saved after {saved[0]:.1f} s" if saved else "never saved")


def told_twice(job: Job) -> None:
    """12. A second SIGTERM starts a second save"""
    job.options = ["--step-s", "0.1", "--save-s", "2"]
    process = job.train_until(3)
    process.terminate()
    time.sleep(1.0)
    process.terminate()
    began = time.monotonic()
    job.finish(process)
    if len(job.checkpoints()) != 1:
        raise Lost(f"checkpoints of {job.checkpoints()} after one stop, {time.monotonic() - began:.1f} s later")
    job.expect_saved()


def other_ranks_silently(job: Job) -> None:
    """13. Another number of ranks is resumed from without a warning"""
    job.ranks, job.options = 2, ["--step-s", "0.2"]
    job.stop(job.train_until(4))
    job.expect_saved()
    if job.resumed("--step-s", "0", ranks=1) != 0:
        raise Lost("the resume failed")
    if "ranks" not in job.output and "reproducibility" not in job.output:
        raise Lost("not a word on it")


SCENARIOS: tuple[Callable[[Job], None], ...] = (
    workers_die,
    exit_code_says_failure,
    one_rank_is_told,
    sentinel_is_removed_early,
    incomplete_blocks_resume,
    missing_optimizer_is_skipped,
    resume_is_not_exact,
    script_goes_on,
    rotation_deletes_it,
    not_in_the_main_thread,
    deaf_in_evaluations,
    told_twice,
    other_ranks_silently,
)


def _run_whole(job: Job) -> None:
    if job.run() != 0:
        raise Lost(f"the run before it failed:\n{job.output[-2000:]}")


@contextlib.contextmanager
def _watching(job: Job) -> Iterator[list[str]]:
    """Checkpoints that look whole before they are complete."""
    seen: list[str] = []
    ended = threading.Event()

    def look() -> None:
        while not ended.wait(0.01):
            for step in job.checkpoints():
                folder = job.folder / f"checkpoint-{step}"
                names = {path.name for path in folder.iterdir()} if folder.exists() else {"trainer_state.json"}
                if names and _SENTINEL not in names and "trainer_state.json" not in names:
                    seen.append(f"{folder.name} has no sentinel, and no trainer_state.json either")

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield seen
    finally:
        ended.set()
        thread.join()


def run(number: int, protection: str) -> str | None:
    """Return what this scenario (numbered from 1) lost, or None."""
    folder = Path(tempfile.mkdtemp(prefix="defect-"))
    job = Job(protection, folder / "job")
    try:
        SCENARIOS[number - 1](job)
    except Lost as lost:
        return str(lost)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return None


def main() -> int:
    parser = argparse.ArgumentParser(
        "benchmarks.hf_defects", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", type=lambda text: [int(one) for one in text.split(",")], help="numbers: 3,8")
    options = parser.parse_args()
    from rich.console import Console
    from rich.table import Table

    table = Table("", "transformers' own", "under reprieve run")
    lost_ours = 0
    for number in options.only or range(1, len(SCENARIOS) + 1):
        title = (SCENARIOS[number - 1].__doc__ or "").strip()
        found = {protection: run(number, protection) for protection in ("stock", "reprieve")}
        lost_ours += found["reprieve"] is not None
        print(title, found, file=sys.stderr, flush=True)
        table.add_row(title, found["stock"] or "nothing lost", found["reprieve"] or "nothing lost")
    Console(width=150).print(table)
    return 1 if lost_ours else 0


if __name__ == "__main__":
    sys.exit(main())
