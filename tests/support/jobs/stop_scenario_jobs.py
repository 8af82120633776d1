"""Loops of other shapes than `loop_jobs.train`, to be stopped and started again, and how to look at what they left."""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import reprieve
from reprieve.checkpoint.buffers.block_pool import BlockPool
from reprieve.checkpoint.folder.catalog import list_checkpoints
from reprieve.checkpoint.folder.verify import verify
from reprieve.ranks.failpoints import reached
from reprieve.testing import Fault, Result, pause, run_ranks, terminate
from reprieve.testing.rank_process import disk
from tests.support.jobs.loop_jobs import BATCH, Augmented, Job, Seen, Undisturbed, noisy, train

PARTS = 24
WIDE_BYTES = 140_000
"""What a checkpoint of `wide` takes on the disk, nearly. Its many files are written one after the other: a save
can be given up between two of them."""


class Setup:
    """What the loops below have in common."""

    def __init__(self, job: Job, **more: object) -> None:
        torch.manual_seed(3)
        self.model = nn.Linear(8, 1)
        random.seed(11), np.random.seed(11), torch.manual_seed(11)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.loader = DataLoader(Augmented(job), BATCH, shuffle=True, collate_fn=noisy)
        self.second = DataLoader(Augmented(job, 24), BATCH, shuffle=True)
        Path(job.folder).mkdir(parents=True, exist_ok=True)
        self.seen = Seen(Path(job.folder), 0)
        self.run: Any = _Undisturbed()
        if job.safe:
            self.run = reprieve.Run(
                Path(job.folder) / "checkpoints", model=self.model, optimizer=self.optimizer, every=job.every,
                grace_period=job.grace, disk=disk(), notices="off", **dict(job.options), **more,
            )  # fmt: skip

    def step(self, batch: Tensor) -> None:
        """The note comes first: where `run.step` is not in a loop over `batches`, it is where the run stops."""
        reached("forward")
        loss = (self.model(batch) * (1 + 0.1 * random.random())).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.seen.add(step=self.run.steps + 1, loss=loss.item().hex())
        self.run.step(loss=loss)


class _Undisturbed(Undisturbed):
    limit: int | None = None

    def epochs(self, count: int | None = None, *, steps: int | None = None) -> Iterator[int]:
        self.limit = steps
        epoch = 0
        while epoch != count and self.steps != steps:
            yield epoch
            epoch += 1

    def batches(self, loader: Any) -> Iterator[Any]:
        for batch in loader:
            yield batch
            if self.steps == self.limit:
                break

    def finish(self) -> None:
        pass


def wide(job: Job) -> None:
    """A state of many files."""
    setup = Setup(job, **{f"part_{number}": nn.Linear(30, 30) for number in range(PARTS)})
    for _ in setup.run.epochs(job.epochs):
        for batch in setup.run.batches(setup.loader):
            time.sleep(job.step_s)
            setup.step(batch)
    setup.seen.end(setup.model)


def only_steps(job: Job, steps: int) -> None:
    """No loader, no epochs."""
    setup = Setup(job)
    for _ in range(setup.run.steps, steps):
        setup.step(torch.randn(BATCH, 8))
    setup.run.finish()
    setup.seen.end(setup.model)


def limited(job: Job, steps: int) -> None:
    """So many steps, which end in the middle of an epoch."""
    setup = Setup(job)
    for _ in setup.run.epochs(steps=steps):
        for batch in setup.run.batches(setup.loader):
            setup.step(batch)
    setup.seen.end(setup.model)


def stops_early(job: Job, at: int) -> None:
    """Good enough after some steps."""
    setup = Setup(job)
    for _ in setup.run.epochs(job.epochs):
        for batch in setup.run.batches(setup.loader):
            setup.step(batch)
            if setup.run.steps == at:
                setup.run.finish()
                break
        if setup.run.steps == at:
            break
    setup.seen.end(setup.model)


def two_passes(job: Job) -> None:
    """One after the other in each epoch."""
    setup = Setup(job)
    for _ in setup.run.epochs(job.epochs):
        for batch in setup.run.batches(setup.second):
            setup.step(batch)
        for batch in setup.run.batches(setup.loader):
            setup.step(batch * 0.5)
    setup.seen.end(setup.model)


def zipped(job: Job) -> None:
    """Two loaders side by side; the shorter one ends both."""
    setup = Setup(job)
    for _ in setup.run.epochs(job.epochs):
        for first, second in zip(setup.run.batches(setup.loader), setup.run.batches(setup.second), strict=False):
            setup.step(first + second)
    setup.seen.end(setup.model)


class Numbers(Dataset[int]):
    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> int:
        return index


def dealt(job: Job) -> None:
    """Samples are dealt out to the ranks there are; each notes its own."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    Path(job.folder).mkdir(parents=True, exist_ok=True)
    seen, model = Seen(Path(job.folder), rank), nn.Linear(1, 1)
    sampler: Any = DistributedSampler(Numbers(), num_replicas=world_size, rank=rank, seed=5)
    loader = DataLoader(Numbers(), BATCH, sampler=sampler)
    run = reprieve.Run(Path(job.folder) / "checkpoints", model=model, every=None, notices="off")
    for epoch in run.epochs(job.epochs):
        sampler.set_epoch(epoch)
        for batch in run.batches(loader):
            reached("forward")
            if dist.is_initialized():
                dist.all_reduce(torch.ones(1))
            run.step()
            seen.add(epoch=epoch, samples=batch.tolist())


# How they are run, and what is left


def told(nth: int, at: str = "forward", rank: int = 0) -> list[Fault]:
    """To stop, at this point; and time to hear it, since these steps are over in less."""
    return [terminate(rank, at, nth=nth), pause(rank, at, 0.2, nth=nth)]


def attempt(
    job: Job, *faults: Fault, fn: Callable[..., None] = train, args: tuple[Any, ...] = (), **options: Any
) -> Result:
    """One rank, alone."""
    return run_ranks(1, fn, job, *args, backend=None, faults=faults, **options)[0]


def seen(folder: str | Path, ranks: int = 1) -> list[Any]:
    """All that a job has seen, by rank. What was done again, after a step that could not be saved, counts once: it has
    to be the same."""
    found = []
    for rank in range(ranks):
        lines = dict.fromkeys((Path(folder) / f"losses-{rank}.jsonl").read_text().splitlines())
        end = Path(folder) / f"end-{rank}.json"
        found.append([*map(json.loads, lines), json.loads(end.read_text()) if end.exists() else None])
    return found


def undisturbed(job: Job, ranks: int = 1, fn: Callable[..., None] = train, args: tuple[Any, ...] = ()) -> list[Any]:
    """What the same script sees without Reprieve."""
    return _undisturbed(
        replace(job, safe=False, folder="", every=None, grace=None, options=(), step_s=0.0), ranks, fn, args
    )


@cache
def _undisturbed(job: Job, ranks: int, fn: Callable[..., None], args: tuple[Any, ...]) -> list[Any]:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        job = replace(job, folder=f"{folder}/job")
        results = run_ranks(ranks, fn, job, *args, backend="gloo" if ranks > 1 else None)
        assert all(result.ok for result in results), str(results[0])
        return seen(job.folder, ranks)


def checkpoints(job: Job) -> list[int]:
    """The steps of all checkpoints, newest first; every one is whole."""
    pool = BlockPool()
    found = list_checkpoints(Path(job.folder) / "checkpoints")
    for one in found:
        verify(one.path, pool)
    return [one.step for one in found]


def steps_seen(job: Job, rank: int = 0) -> int:
    try:
        return len((Path(job.folder) / f"losses-{rank}.jsonl").read_text().splitlines())
    except FileNotFoundError:
        return 0
