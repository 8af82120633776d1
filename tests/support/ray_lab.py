"""Runs on Ray for tests: starts drivers (jobs/ray_job.py), reads what their workers wrote, compares it."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch

from tests.support import ray_forks
from tests.support.jobs.ray_job import RayOptions, batch

LIMIT_S = 540
"""How long all drivers of a test may take together: less than the test's own limit, whose end shows no output."""
STARTS = 3
"""Ray gives up its own start after 30 s, which a busy machine may need."""
HOST = "127.0.0.2"
"""Not 127.0.0.1, which Ray replaces by an address that other machines can reach."""
ROOMS = {f"room-{number}": 2 for number in range(100)}
"""Resources of the first node: places for two workers of each test that adds nodes and drains them."""


@dataclass(frozen=True, slots=True)
class DriverEnd:
    """How a driver ended."""

    code: int
    output: str

    def __str__(self) -> str:
        return f"exit code {self.code}\n{self.output[-6000:]}"


class RayLab:
    """One run: a folder, and any number of drivers one after the other."""

    def __init__(self, folder: Path, env: dict[str, str], *, limit_s: float = LIMIT_S) -> None:
        self.folder = folder
        self.env = env
        self._end = time.monotonic() + limit_s
        self._drivers: list[subprocess.Popen[bytes]] = []
        self._nodes: list[subprocess.Popen[bytes]] = []
        self._others: list[RayLab] = []

    def start(self, *command: str, env: dict[str, str] | None = None, **options: Any) -> subprocess.Popen[bytes]:
        """Start a driver. `command`: what comes before the script, such as `reprieve run python`."""
        text = RayOptions(folder=str(self.folder), **options).to_json()
        return self.start_command([*(command or (sys.executable,)), "-m", "tests.support.jobs.ray_job", text], env)

    def start_command(self, job: Sequence[str], env: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
        """Start a driver that is another program."""
        with (self.folder / "output").open("ab") as output:
            driver = subprocess.Popen(
                job,
                env={**self.env, **(env or {})},
                stdout=output,
                stderr=output,
                cwd=self.folder,
                start_new_session=True,
            )
        self._drivers.append(driver)
        return driver

    def wait(self, driver: subprocess.Popen[bytes]) -> DriverEnd:
        limit_s = self._left_s()
        try:
            code = driver.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the driver did not end within {limit_s:.0f} s\n{self.output()[-6000:]}") from None
        return DriverEnd(code, self.output())

    def run(self, *command: str, **options: Any) -> DriverEnd:
        """Start a driver and wait for its end."""
        return self.wait(self.start(*command, **options))

    def output(self) -> str:
        path = self.folder / "output"
        return path.read_text(errors="replace") if path.exists() else ""

    def lines(self, rank: int) -> list[dict[str, Any]]:
        path = self.folder / f"log-{rank}"
        if not path.exists():
            return []
        return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]

    def starts(self, rank: int = 0) -> list[int]:
        """The step that each generation started at."""
        return [line["started"] for line in self.lines(rank) if "started" in line]

    def steps(self, rank: int = 0) -> list[int]:
        return [line["step"] for line in self.lines(rank) if "loss" in line]

    def losses(self, rank: int = 0) -> list[float]:
        return [line["loss"] for line in self.lines(rank) if "loss" in line]

    def weights(self, rank: int = 0) -> dict[str, Any]:
        return next(line["ended"] for line in reversed(self.lines(rank)) if "ended" in line)

    def live_workers(self) -> dict[str, set[int]]:
        """The worker processes of this run that have entered the training function, by generation."""
        found: dict[str, set[int]] = {}
        for path in self.folder.glob("pid-*-*"):
            with contextlib.suppress(ValueError, OSError):
                pid = int(path.read_text())
                if b"RayTrainWorker" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    found.setdefault(path.name.split("-")[1], set()).add(pid)
        return found

    def result(self) -> dict[str, Any]:
        return dict(json.loads((self.folder / "result").read_text()))

    def wait_for_step(self, step: int, rank: int = 0) -> None:
        self.until(
            lambda: step in self.steps(rank), f"step {step}", during=self._drivers[-1] if self._drivers else None
        )

    def until(
        self,
        is_true: Callable[[], object],
        what: str,
        limit_s: float | None = None,
        *,
        during: subprocess.Popen[bytes] | None = None,
    ) -> None:
        """Wait until this is true. `during`: only while this driver runs."""
        limit_s = self._left_s() if limit_s is None else limit_s
        end = time.monotonic() + limit_s
        while not is_true():
            has_ended = during is not None and during.poll() is not None
            assert not has_ended or is_true(), f"the driver has ended before this: {what}\n{self.output()[-6000:]}"
            assert time.monotonic() < end, f"not within {limit_s:.0f} s: {what}\n{self.output()[-6000:]}"
            time.sleep(0.05)

    def _left_s(self) -> float:
        return max(5.0, self._end - time.monotonic())

    def assert_nothing_lost(self, steps: int, workers: int) -> None:
        """Every worker did every step once, in order, with the losses and final weights of an undisturbed run."""
        losses, weights = undisturbed_run(steps, workers)
        for rank in range(workers):
            assert self.steps(rank) == list(range(steps)), f"rank {rank}\n{self.output()[-6000:]}"
            assert self.losses(rank) == losses[rank], f"rank {rank}: the losses differ"
            assert self.weights(rank) == weights, f"rank {rank}: the weights differ"

    def completed(self) -> list[int]:
        """The steps of the JIT checkpoints that the output names. All nodes here share a folder of logs, and each of
        them may forward a line of any worker."""
        found = re.findall(r"JIT checkpoint completed in [\d.]+s: step (\d+)", self.output())
        return sorted(set(map(int, found)))

    def failures_counted(self) -> int:
        """How often Ray counted a failure of a worker: the number in its last message about one.

        Lines of other processes may come between the lines of a message."""
        sources: dict[str, str] = {}
        counts = [0]
        for line in self.output().splitlines():
            process = line.partition(")")[0]
            if source := re.search("Source: (.+)", line):
                sources[process] = source[1].strip()
            elif (count := re.search(r"Error count: (\d+)", line)) and sources.get(process) == "worker group":
                counts.append(int(count[1]))
        return max(counts)

    def undone(self, plan: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """The disruptions that did not happen."""
        return [entry for number, entry in enumerate(plan) if not (self.folder / f"done-{number}").exists()]

    def another(self, name: str) -> RayLab:
        """Another run on the same cluster."""
        folder = self.folder / name
        folder.mkdir()
        lab = RayLab(folder, self.env, limit_s=self._left_s())
        self._others.append(lab)
        return lab

    def room(self) -> str:
        """Return a resource that no other test uses. The first node has room for two workers that need it."""
        with self._one_at_a_time() as file:
            number = len(file.read())
            file.write(".")  # one for each
        return f"room-{number}"

    @contextlib.contextmanager
    def _one_at_a_time(self) -> Iterator[IO[str]]:
        with lock_path(self.env["RAY_ADDRESS"]).open("a+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            yield file

    def add_node(self, resource: str, workers: int = 1, shell: Callable[[str], str] | None = None) -> int:
        """Add a node to the cluster, which a test may drain. It has room for so many workers that need this resource,
        and for nothing else: the runs of other tests stay away.

        `shell`: makes the command of a container out of that of the node, which then runs in a process namespace of its
        own, as in a pod. Returns the process id of its first process."""
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--address", self.env["RAY_ADDRESS"]]
        room = ["--num-cpus", "0", "--resources", json.dumps({resource: workers})]
        options = ["--node-ip-address", HOST, *room, "--block", "--disable-usage-stats"]
        start, env = [*command, *options], dict(self.env)
        if shell is not None:
            container = ["bash", "-c", "--", shell(shlex.join(start))]
            start = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", *container]
            env.pop(ray_forks.ADDRESS, None)  # it knows no other namespace
        path = self.folder / f"node-{len(self._nodes)}.log"
        for left in reversed(range(STARTS)):
            # Two nodes that start at the same moment choose the same name for their socket, and one of them dies.
            with self._one_at_a_time():
                with path.open("wb") as log:
                    node = subprocess.Popen(start, env=env, stdout=log, stderr=log, start_new_session=True)
                self._nodes.append(node)
                if self.has_started(node, path, settle_s=0):
                    break
            assert left, f"the node did not start:\n{path.read_text(errors='replace')[-3000:]}"
        children = Path(f"/proc/{node.pid}/task/{node.pid}/children").read_text().split()
        return node.pid if shell is None else int(children[0])

    def close(self) -> None:
        for lab in self._others:
            lab.close()
        for node in self._nodes:
            self.end(node)
        for driver in self._drivers:
            self.end(driver)

    @staticmethod
    def end(process: subprocess.Popen[bytes]) -> None:
        """End a process with all that it has started."""
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    @staticmethod
    def has_started(process: subprocess.Popen[bytes], log: Path, *, settle_s: float = 2) -> bool:
        """Wait for a cluster or a node. Returns whether it is there.

        `settle_s`: a cluster looks at its processes for the first time a second later."""
        while process.poll() is None:
            if "Ray runtime started" in log.read_text(errors="replace"):
                time.sleep(settle_s)
                return process.poll() is None
            time.sleep(0.1)
        return False


def lock_path(address: str) -> Path:
    """The file that the tests on this cluster lock."""
    return Path(tempfile.gettempdir(), f"ray-lab-{address}")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


@functools.cache
def undisturbed_run(steps: int, workers: int) -> tuple[Sequence[Sequence[float]], dict[str, Any]]:
    """The losses of each rank of the job and its final weights, computed in this process."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses: list[list[float]] = [[] for _ in range(workers)]
    for step in range(steps):
        gradients = []
        for rank in range(workers):
            loss = (model(batch(step, rank)) ** 2).mean()
            losses[rank].append(loss.item())
            gradients.append(torch.autograd.grad(loss, list(model.parameters())))
        for parameter, *parts in zip(model.parameters(), *gradients, strict=True):
            total = parts[0].clone()
            for part in parts[1:]:
                total += part
            parameter.grad = total
        optimizer.step()
        optimizer.zero_grad()
    return losses, {name: value.tolist() for name, value in model.state_dict().items()}
