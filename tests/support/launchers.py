"""Two ways to start the jobs of `loop_jobs`: quickly from a fork server, or as people do, with python and torchrun."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from reprieve.testing import start_ranks
from tests.support.jobs.loop_jobs import Job, train
from tests.support.places import HIDE_OPTIONAL, JOBS

LIMIT_S = 150


class Forked:
    """Ranks from the fork server: real processes, a third of a second each."""

    def __init__(self, job: Job, ranks: int, **options: Any) -> None:
        backend = "gloo" if ranks > 1 else None
        self._ranks = start_ranks(ranks, train, job, backend=backend, timeout=LIMIT_S, **options)

    def signal(self, rank: int) -> None:
        self._ranks.signal(rank, signal.SIGTERM)

    def wait(self) -> list[int]:
        with self._ranks:
            results = self._ranks.wait()
        codes = [-int(result.signal) if result.signal is not None else result.exit_code for result in results]
        if any(code not in (0, 143, -15) for code in codes):
            raise AssertionError("\n\n".join(map(str, results)))
        return [code for code in codes if code is not None]


class Spawned:
    """`python script` for one rank, `torchrun script` for several."""

    def __init__(self, job: Job, ranks: int) -> None:
        self._folder = Path(job.folder)
        self._ranks = ranks
        for rank in range(ranks):
            for name in ("pid", "code"):
                (self._folder / f"{name}-{rank}").unlink(missing_ok=True)
        worker = [str(JOBS / "record_exit.py"), str(JOBS / "loop_jobs.py"), json.dumps(asdict(job))]
        command = [sys.executable, *worker]
        if ranks > 1:
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
            command += worker
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", **HIDE_OPTIONAL},
        )  # fmt: skip

    def signal(self, rank: int) -> None:
        os.kill(int((self._folder / f"pid-{rank}").read_text()), signal.SIGTERM)

    def signal_parent(self) -> None:
        """As Kubernetes and Ctrl-\\ in a job manager do: whoever was started."""
        if self._ranks == 1:
            self.signal(0)
        else:
            self._process.send_signal(signal.SIGTERM)

    def wait(self) -> list[int]:
        try:
            output, _ = self._process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            raise
        codes = [self._folder / f"code-{rank}" for rank in range(self._ranks)]
        assert all(path.exists() for path in codes), output
        found = [int(path.read_text()) for path in codes]
        assert all(code in (0, 143) for code in found), f"{found}\n{output}"
        return found


def steps_seen(job: Job) -> int:
    path = Path(job.folder) / "losses-0.jsonl"
    return path.read_text().count("loss") if path.exists() else 0


def wait_for_steps(job: Job, count: int) -> None:
    end = time.monotonic() + LIMIT_S
    while steps_seen(job) < count and time.monotonic() < end:
        time.sleep(0.002)
