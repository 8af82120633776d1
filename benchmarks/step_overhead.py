"""The cost of `reprieve.Run` for a training step while nothing happens: `python -m benchmarks.step_overhead`.

It measures CPU time in two ways. *Overhead*: in Reprieve's calls (the next batch, `step`), less what torch's own
iterator takes inside them. *Difference*: of the whole process in a loop with `Run`, less that in the plain loop, in
turns. Reprieve's threads and what workers send with a batch show only here, and so does the noise of the machine.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

import reprieve
from reprieve.testing import run_ranks, values

STEPS = 100
"""Per reading of the clock: enough for the clock not to matter, and usually over before the kernel preempts it."""
GOES = 30
CASES = {"1": (1, 0), "workers": (1, 2), "4": (4, 0)}
"""The cases by their name in the keys: ranks, and DataLoader workers of each."""


class Overhead(NamedTuple):
    direct_us: float
    difference_us: float


def figures(folder: Path) -> dict[str, float]:
    """`step.<case>.overhead_us` and `…difference_us`, and the largest overhead without workers."""
    found: dict[str, float] = {}
    for name, (ranks, workers) in CASES.items():
        print(f"step: {ranks} rank{'s' * (ranks > 1)}, {workers} workers", file=sys.stderr)
        cost = overhead(folder / f"step-{name}", ranks, workers)
        print(f"step: direct {cost.direct_us:.2f} µs, difference {cost.difference_us:.2f} µs", file=sys.stderr)
        found[f"step.{name}.overhead_us"] = round(cost.direct_us, 3)
        found[f"step.{name}.difference_us"] = round(cost.difference_us, 3)
    # With workers the clock includes other code: threads that feed them wait for the same interpreter lock.
    return {"step.overhead_us": max(found[f"step.{name}.overhead_us"] for name in ("1", "4")), **found}


def overhead(folder: Path, ranks: int, workers: int) -> Overhead:
    """Take the rank with the highest value."""
    told = values(run_ranks(ranks, _measure, folder, workers, timeout="120s", env={"REPRIEVE_GRACE": None}))
    return Overhead(max(direct for direct, _ in told), max(difference for _, difference in told))


# What the ranks run


class _Samples(Dataset[Any]):
    """Draws random numbers, as augmentation does. With workers it returns no tensors: receiving one from a worker takes
    the main process a millisecond, and its noise would hide everything else."""

    def __init__(self, *, tensors: bool) -> None:
        self._tensors = tensors

    def __len__(self) -> int:
        return 4 * STEPS * (GOES + 1)

    def __getitem__(self, index: int) -> Any:
        return torch.rand(4) if self._tensors else random.random()


def _as_it_is(samples: list[float]) -> list[float]:
    return samples


class _Inside:
    """Measures how long torch's iterators run."""

    def __init__(self) -> None:
        self.ns = 0
        stock = _BaseDataLoaderIter.__next__

        def timed(iterator: Any) -> Any:
            start = time.thread_time_ns()
            try:
                return stock(iterator)
            finally:
                self.ns += time.thread_time_ns() - start

        self._timed, self._stock = timed, stock

    def __enter__(self) -> _Inside:
        _BaseDataLoaderIter.__next__ = self._timed  # type: ignore[assignment, method-assign]
        return self

    def __exit__(self, *exc: object) -> None:
        _BaseDataLoaderIter.__next__ = self._stock  # type: ignore[method-assign]


def _measure(folder: Path, workers: int) -> tuple[float, float]:
    """Return overhead and difference in microseconds per step. Ranks take turns: elsewhere each has its own core."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    options: dict[str, Any] = {"num_workers": workers}
    if workers:
        options |= {"collate_fn": _as_it_is, "prefetch_factor": STEPS}
    plain_loader, our_loader = (DataLoader(_Samples(tensors=not workers), 2, shuffle=True, **options) for _ in range(2))
    with reprieve.Run(folder, notices="off", model=nn.Linear(4, 4)) as run:
        plain, ours = iter(plain_loader), run.batches(our_loader)
        for rank in range(dist.get_world_size()):
            if rank == dist.get_rank():
                found = _goes(plain, ours, run, pause_s=0.05 if workers else 0)
            dist.barrier()
    return found


def _goes(plain: Iterator[Any], ours: Iterator[Any], run: reprieve.Run, pause_s: float) -> tuple[float, float]:
    """`pause_s`: the pause before each reading, so that workers are ahead and nothing waits for them."""
    inside, loss = _Inside(), torch.zeros(())
    direct, with_run, without = [], [], []
    _plain(plain, loss)
    _ours(ours, loss, run)
    for _ in range(GOES):
        time.sleep(pause_s)
        without.append(_cpu_us(lambda: _plain(plain, loss)))
        with_run.append(_cpu_us(lambda: _ours(ours, loss, run)))
        time.sleep(pause_s)
        with inside:
            direct.append(_direct_us(ours, loss, run, inside))
    return median(direct), median(with_run) - median(without)


def _plain(batches: Iterator[Any], loss: Tensor) -> None:
    for _ in range(STEPS):
        next(batches)
        loss.add_(1)


def _ours(batches: Iterator[Any], loss: Tensor, run: reprieve.Run) -> None:
    for _ in range(STEPS):
        next(batches)
        loss.add_(1)
        run.step(loss=loss)


def _direct_us(batches: Iterator[Any], loss: Tensor, run: reprieve.Run, inside: _Inside) -> float:
    clock, spent, inside.ns = time.thread_time_ns, 0, 0
    for _ in range(STEPS):
        start = clock()
        next(batches)
        run.step(loss=loss)
        spent += clock() - start
    # Each of the two pairs of readings has about one reading in it, and this clock is a system call.
    reading = clock()
    for _ in range(STEPS):
        clock()
    readings = 2 * (clock() - reading)
    return (spent - inside.ns - readings) / STEPS / 1000


def _cpu_us(work: Callable[[], None]) -> float:
    start = time.process_time_ns()
    work()
    return (time.process_time_ns() - start) / STEPS / 1000


if __name__ == "__main__":
    with TemporaryDirectory(dir=os.getcwd()) as temporary:
        print(figures(Path(temporary)))
