"""The training jobs that are stopped and started again, and the same without Reprieve.

What a job has seen goes into a folder: `losses-<rank>.jsonl`, a line for each step and each evaluation, and
`end-<rank>.json`, written once at its end. An interrupted job appends to them.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

import reprieve
from reprieve.ranks.failpoints import reached
from reprieve.testing.rank_process import disk

SAMPLES, WIDTH, BATCH = 40, 8, 4


@dataclass(frozen=True, slots=True)
class Job:
    """What is trained, and how."""

    folder: str
    safe: bool = True
    kind: str = "plain"
    """`plain`, `ddp` or `fsdp`."""
    workers: int = 0
    persistent: bool = False
    accumulate: int = 1
    epochs: int = 3
    dropout: bool = True
    augment: bool = True
    collator: bool = True
    norm: bool = True
    iterable: bool = False
    gan: bool = False
    amp: bool = False
    evaluate_every: int = 0
    """Steps between evaluations in the middle of an epoch; 0: only after each epoch."""
    every: Any = None
    step_s: float = 0.0
    grace: float | None = None
    options: tuple[tuple[str, Any], ...] = ()

    def plain(self) -> Job:
        from dataclasses import replace

        return replace(self, safe=False, folder=f"{self.folder}-undisturbed")


class Augmented(Dataset[Tensor]):
    """Random in every way that people are."""

    def __init__(self, job: Job, count: int = SAMPLES) -> None:
        self._data = torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(7))
        self._augment = job.augment

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> Tensor:
        reached("fetch")
        sample = self._data[index]
        if self._augment:
            sample = sample * (1 + 0.1 * random.random()) + 0.1 * np.random.rand() + 0.1 * torch.rand(WIDTH)
        return sample


class Stream(IterableDataset[Tensor]):
    """Each worker its part; knows where it is."""

    def __init__(self, count: int = SAMPLES) -> None:
        self._data = torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(7))
        self._next: int | None = None

    def __iter__(self) -> Iterator[Tensor]:
        info = torch.utils.data.get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        if self._next is None:
            self._next = first
        while self._next < len(self._data):
            at, self._next = self._next, self._next + step
            yield self._data[at] + 0.1 * torch.rand(WIDTH)
        self._next = None

    def state_dict(self) -> dict[str, Any]:
        return {"next": self._next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._next = state["next"]


def noisy(samples: list[Tensor]) -> Tensor:
    return torch.stack(samples) + 0.01 * torch.rand(len(samples), WIDTH) * random.random()


class Net(nn.Module):
    """Its parameters are used in another order than that in which they are registered."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.last = nn.Linear(16, 1)
        self.middle = nn.Linear(16, 16)
        self.first = nn.Linear(WIDTH, 16)
        self.norm = nn.BatchNorm1d(16) if job.norm else nn.Identity()
        self.dropout = nn.Dropout(0.2 if job.dropout else 0.0)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.dropout(torch.relu(self.norm(self.first(x))))
        return self.last(torch.tanh(self.middle(hidden)))


class Undisturbed:
    """In place of `Run`: what the same script does without it."""

    def __init__(self) -> None:
        self.steps = 0
        self.batch = 0

    def epochs(self, count: int) -> Iterable[int]:
        return range(count)

    def batches(self, loader: Iterable[Tensor]) -> Iterator[Tensor]:
        self.batch = 0
        for batch in loader:
            self.batch += 1
            yield batch

    def evaluation(self, loader: Iterable[Tensor]) -> Iterable[Tensor]:
        return loader

    def step(self, **_: Any) -> None:
        self.steps += 1


def train(job: Job) -> None:
    """One attempt at the job, from where the last one was."""
    reached("set-up")
    folder = Path(job.folder)
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    folder.mkdir(parents=True, exist_ok=True)
    seed = 11 + rank
    torch.manual_seed(3)  # the model is the same everywhere
    model: nn.Module = Net(job)
    random.seed(seed), np.random.seed(seed), torch.manual_seed(seed)
    if job.kind == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    elif job.kind == "fsdp":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
    data: Any = Stream() if job.iterable else Augmented(job)
    sampler = DistributedSampler(data, num_replicas=world_size, rank=rank) if world_size > 1 else None
    loader = DataLoader(
        data, BATCH, shuffle=None if job.iterable else sampler is None, sampler=sampler, num_workers=job.workers,
        persistent_workers=job.persistent, collate_fn=noisy if job.collator else None,
    )  # fmt: skip
    eval_loader = DataLoader(Augmented(job, 8), BATCH, num_workers=0)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.9)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    critic = critic_optimizer = None
    if job.gan:
        critic = nn.Linear(1, 1)
        critic_optimizer = torch.optim.SGD(critic.parameters(), lr=0.1, momentum=0.9)
        state |= {"critic": critic, "critic_optimizer": critic_optimizer}
    seen = Seen(folder, rank)
    run: Any = Undisturbed()
    if job.safe:
        run = reprieve.Run(
            folder / "checkpoints",
            every=job.every,
            grace_period=job.grace,
            disk=disk(),
            notices="off",
            **dict(job.options),
            **state,
        )
    for epoch in run.epochs(job.epochs):
        if sampler is not None:
            sampler.set_epoch(epoch)
        model.train()
        for batch in run.batches(loader):
            reached("forward")
            loss = model(batch).square().mean()
            if critic is not None:
                loss = loss + critic(model(batch)).mean()
            reached("backward")
            (loss / job.accumulate).backward()
            if job.step_s:
                time.sleep(job.step_s)
            if run.batch % job.accumulate:
                continue
            reached("optimizer")
            optimizer.step()
            if critic_optimizer is not None:
                critic_optimizer.step()
                critic_optimizer.zero_grad()
            scheduler.step()
            optimizer.zero_grad()
            run.step(loss=loss)
            seen.add(step=run.steps, loss=loss.item().hex(), lr=optimizer.param_groups[0]["lr"])
            if job.evaluate_every and run.steps % job.evaluate_every == 0:
                seen.add(step=run.steps, evaluation=evaluate(run, model, eval_loader))
                model.train()
        seen.add(epoch=epoch, evaluation=evaluate(run, model, eval_loader))
    seen.end(model, critic)


def evaluate(run: Any, model: nn.Module, loader: Iterable[Tensor]) -> str:
    model.eval()
    total = 0.0
    with torch.no_grad():
        for batch in run.evaluation(loader):
            reached("evaluation")
            # Evaluations may draw random numbers, too.
            total += float(model(batch).sum()) + random.random() + float(torch.rand(()))
    return total.hex()


class Seen:
    """What a job has seen."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._losses = folder / f"losses-{rank}.jsonl"
        self._end = folder / f"end-{rank}.json"

    def add(self, **line: Any) -> None:
        with self._losses.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def end(self, *models: nn.Module | None) -> None:
        digest = hashlib.sha256()
        for model in models:
            for name, value in (model.state_dict() if model is not None else {}).items():
                local = value.to_local() if hasattr(value, "to_local") else value
                digest.update(name.encode() + local.contiguous().numpy().tobytes())
        drawn = [random.random(), float(np.random.rand()), float(torch.rand(()))]
        self._end.write_text(json.dumps({"weights": digest.hexdigest(), "drawn": drawn}))


def seen_by(folder: Path | str, ranks: int) -> list[Any]:
    """All that a finished job has seen, by rank. What a loop has done since the last step that is saved it may do
    again: those lines count once."""
    seen = []
    for rank in range(ranks):
        lines, since_step = list[Any](), set[str]()
        for line in (Path(folder) / f"losses-{rank}.jsonl").read_text().splitlines():
            if line in since_step:
                continue
            if "loss" in (new := json.loads(line)):
                since_step.clear()
            since_step.add(line)
            lines.append(new)
        seen.append([*lines, json.loads((Path(folder) / f"end-{rank}.json").read_text())])
    return seen


if __name__ == "__main__":
    # Under python and torchrun: the job as JSON.
    given = Job(**json.loads(sys.argv[1]))
    torch.set_num_threads(1)
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo")
    train(given)
