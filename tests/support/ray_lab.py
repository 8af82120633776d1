"""Runs on Ray for tests: starts drivers (jobs/ray_job.py), reads what their workers wrote, compares it."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.support.jobs.ray_job import RayOptions, batch

LIMIT_S = 240
HOST = "127.0.0.2"
"""Not 127.0.0.1, which Ray replaces by an address that other machines can reach."""


@dataclass(frozen=True, slots=True)
class DriverEnd:
    """How a driver ended."""

    code: int
    output: str

    def __str__(self) -> str:
        return f"exit code {self.code}\n{self.output[-6000:]}"


class RayLab:
    """One run: a folder, and any number of drivers one after the other."""

    def __init__(self, folder: Path, env: dict[str, str]) -> None:
        self.folder = folder
        self.env = env
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

    def wait(self, driver: subprocess.Popen[bytes], limit_s: float = LIMIT_S) -> DriverEnd:
        try:
            code = driver.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the driver did not end within {limit_s} s\n{self.output()[-6000:]}") from None
        return DriverEnd(code, self.output())

    def run(self, *command: str, **options: Any) -> DriverEnd:
        """Start a driver and wait for its end."""
        return self.wait(self.start(*command, **options))

    def output(self) -> str:
        return (self.folder / "output").read_text(errors="replace")

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

    def pid(self, rank: int | str) -> int:
        return int((self.folder / f"pid-{rank}").read_text())

    def live_workers(self) -> set[int]:
        """The worker processes of this run that have entered the training function."""
        found = set()
        for path in self.folder.glob("pid-[0-9]*"):
            with contextlib.suppress(ValueError, OSError):
                pid = int(path.read_text())
                if b"RayTrainWorker" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    found.add(pid)
        return found

    def result(self) -> dict[str, Any]:
        return dict(json.loads((self.folder / "result").read_text()))

    def wait_for_step(self, step: int, rank: int = 0) -> None:
        self.until(lambda: step in self.steps(rank), f"step {step}")

    def until(self, is_true: Callable[[], object], what: str, limit_s: float = LIMIT_S) -> None:
        end = time.monotonic() + limit_s
        while not is_true():
            assert time.monotonic() < end, f"not within {limit_s} s: {what}\n{self.output()[-6000:]}"
            time.sleep(0.05)

    def assert_nothing_lost(self, steps: int, workers: int, *, optimizer_state: bool = True) -> None:
        """Every worker did every step once, in order, with the losses of an undisturbed run."""
        expected = undisturbed_losses(steps, workers)
        for rank in range(workers):
            assert self.steps(rank) == list(range(steps)), f"rank {rank}\n{self.output()[-6000:]}"
            assert self.losses(rank) == expected[rank], f"rank {rank}: the losses differ"

    def failures_counted(self) -> int:
        """How often Ray counted a failure of a worker: the number in its last message about one."""
        counts = re.findall(r"Source: worker group\n.*Error count: (\d+)", self.output())
        return max(map(int, counts), default=0)

    def undone(self, plan: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """The disruptions that did not happen."""
        return [entry for number, entry in enumerate(plan) if not (self.folder / f"done-{number}").exists()]

    def another(self, name: str) -> RayLab:
        """Another run on the same cluster."""
        folder = self.folder / name
        folder.mkdir()
        lab = RayLab(folder, self.env)
        self._others.append(lab)
        return lab

    def add_node(self, resource: str) -> None:
        """Add a node to the cluster, which a test may drain. It has room for one worker that needs this resource, and
        for nothing else: the runs of other tests stay away."""
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--address", self.env["RAY_ADDRESS"]]
        room = ["--num-cpus", "0", "--resources", json.dumps({resource: 1})]
        options = ["--node-ip-address", HOST, *room, "--block", "--disable-usage-stats"]
        path = self.folder / f"node-{len(self._nodes)}.log"
        with path.open("wb") as log:
            node = subprocess.Popen([*command, *options], env=self.env, stdout=log, stderr=log, start_new_session=True)
        self._nodes.append(node)
        end = time.monotonic() + 120
        while "Ray runtime started" not in (text := path.read_text(errors="replace")):
            assert time.monotonic() < end and node.poll() is None, text
            time.sleep(0.1)

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
    def wait_for_cluster(address: str, process: subprocess.Popen[bytes], log: Path) -> None:
        end = time.monotonic() + 120
        host, _, port = address.partition(":")
        while time.monotonic() < end and process.poll() is None:
            with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=1):
                return
            time.sleep(0.1)
        raise AssertionError(f"Ray did not start:\n{log.read_text(errors='replace')[-3000:]}")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


@functools.cache
def undisturbed_losses(steps: int, workers: int) -> Sequence[Sequence[float]]:
    """The losses of each rank of the job, computed in this process."""
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
    return losses
