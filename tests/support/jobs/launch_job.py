"""A training script, as people write them, for the tests of the launcher: `python launch_job.py '{"steps": 30}'`.

Each rank writes a line per step to `seen-<rank>.jsonl` in the job's folder. A resumed job appends.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import reprieve
from reprieve.storage.disk import Disk, OpenFile
from reprieve.testing.faulty_disks import SlowDisk


@dataclass(frozen=True, kw_only=True)
class Options:
    folder: str
    steps: int = 30
    step_s: float = 0.0
    """How long a step takes, until the file `hurry` is in the job's folder. A test of stops gives more steps than it
    needs, so that none comes after the last one, and then has the rest trained without pauses."""
    safe: bool = True
    width: int = 16
    every: str | int = "never"
    by_environment: bool = False
    """The folder of the checkpoints and how often to save come from the environment."""
    crash_at: int | None = None
    hang_at: int | None = None
    leave_at: int | None = None
    """The script ends there, with 0."""
    kill_at: int | None = None
    """The last rank kills itself there."""
    exhaust_at: int | None = None
    """The last rank takes memory from there on, until it is killed. Only once: a resumed job trains on."""
    reports_all: bool = False
    """Also how many epochs there are, and the learning rate."""
    holds_saves: bool = False
    """Saves wait while the file `hold` is in the job's folder."""
    deaf: bool = False
    """Ignores SIGTERM, in the whole process."""
    slow: int | None = None
    """Bytes a second that its disk writes."""
    collective_timeout_s: float = 1800.0
    desert: bool = False
    """The last rank leaves in the middle of a step once a stop is requested, and the others wait for it."""
    children: bool = False
    """Starts a process that starts a process, and forgets both."""


def main(options: Options) -> None:
    if options.deaf:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1:
        torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=options.collective_timeout_s))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, options.width), nn.Dropout(0.1), nn.Linear(options.width, 1))
    optimizer = Adam(model, ranks)
    data = TensorDataset(torch.randn(64, 4, generator=torch.Generator().manual_seed(1)))
    sampler = DistributedSampler(data) if ranks > 1 else None
    loader = DataLoader(data, 4, shuffle=sampler is None, sampler=sampler)
    if options.children and os.fork() == 0:
        if os.fork() == 0:
            time.sleep(600)
        os._exit(0)
    seen = (Path(options.folder) / f"seen-{rank}.jsonl").open("a", buffering=1)
    checkpoints = None if options.by_environment else Path(options.folder) / "checkpoints"
    every = None if options.by_environment else options.every
    if not options.safe:
        for step, (batch,) in zip(range(options.steps), _for_ever(loader), strict=False):
            _step(model, optimizer, batch, step + 1, options)
        return
    disk: Disk | None = SlowDisk(options.slow) if options.slow else None
    if options.holds_saves:
        disk = HeldDisk(Path(options.folder) / "hold")
    (Path(options.folder) / f"reached-{rank}").touch()
    with reprieve.Run(checkpoints, model=model, optimizer=optimizer, every=every, notices="off", disk=disk) as run:
        for _ in run.epochs(options.steps // len(loader) if options.reports_all else None, steps=options.steps):
            for (batch,) in run.batches(loader):
                if options.desert and rank == ranks - 1:
                    time.sleep(options.step_s)  # the others wait in the collective
                    if run._session.stop_listener.stop is not None:
                        os._exit(1)
                loss = _step(model, optimizer, batch, run.steps + 1, options)
                run.step(loss=loss, **({"learning_rate": 0.001} if options.reports_all else {}))
                seen.write(json.dumps([run.steps, loss.item()]) + "\n")
                if run.steps == options.leave_at:
                    return
                if run.steps == options.kill_at and rank == ranks - 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                if run.steps == options.exhaust_at and rank == ranks - 1:
                    _exhaust_memory(Path(options.folder) / "exhausted")
                if run.steps == options.crash_at:
                    raise RuntimeError(f"it always fails at step {run.steps}")
                if run.steps == options.hang_at:
                    _wait_for_ever()
    if ranks > 1:
        torch.distributed.destroy_process_group()


class HeldDisk(Disk):
    """A disk that writes nothing while a file exists."""

    def __init__(self, hold: Path) -> None:
        self._hold = hold

    def write(self, file: OpenFile, data: memoryview, offset: int) -> None:
        while self._hold.exists():
            time.sleep(0.05)
        super().write(file, data, offset)


class Adam:
    """On the mean of all ranks' gradients. Torch's own imports dynamo, as DDP does: that takes longer than this job."""

    def __init__(self, model: nn.Module, ranks: int) -> None:
        self._parameters = dict(model.named_parameters())
        self._ranks = ranks
        self._moments = {name: torch.zeros(2, *one.shape) for name, one in self._parameters.items()}

    @torch.no_grad()
    def step(self) -> None:
        for name, parameter in self._parameters.items():
            gradient, parameter.grad = parameter.grad, None
            assert gradient is not None
            if self._ranks > 1:
                torch.distributed.all_reduce(gradient)
            mean, variance = self._moments[name]
            mean.lerp_(gradient / self._ranks, 0.1)
            variance.lerp_((gradient / self._ranks).square(), 0.1)
            parameter.sub_(0.001 * mean / (variance.sqrt() + 1e-8))

    def state_dict(self) -> dict[str, torch.Tensor]:
        return self._moments

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        for name, moments in self._moments.items():
            moments.copy_(state[name])


def _step(model: nn.Module, optimizer: Adam, batch: torch.Tensor, step: int, options: Options) -> torch.Tensor:
    loss: torch.Tensor = model(batch).square().mean()
    loss.backward()
    optimizer.step()
    if options.step_s and not (Path(options.folder) / "hurry").exists():
        time.sleep(options.step_s)
    return loss.detach()


def _exhaust_memory(done: Path) -> None:
    if not done.exists():
        done.touch()
        taken = [bytearray(os.urandom(2**24)) for _ in range(10_000)]
        raise RuntimeError(f"there is memory for {len(taken)} blocks")


def _for_ever(loader: DataLoader[tuple[torch.Tensor, ...]]):  # type: ignore[no-untyped-def]
    while True:
        yield from loader


def _wait_for_ever() -> None:
    while True:
        time.sleep(1)


if __name__ == "__main__":
    main(Options(**json.loads(sys.argv[1])))
