"""Several ranks: how evenly they split a save, how much faster it is where storage is the limit, and a restore too.

Real processes on this machine. Some figures throttle each rank's file system: its writes (or reads) take as long as
they would at a given number of bytes per second, so that neither this machine's disk nor its two cores are measured.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.state import TrainingState, shape_of
from reprieve import Checkpointer
from reprieve.checkpoint.io import reader
from reprieve.checkpoint.restore import resume
from reprieve.storage.disk import Disk, OpenFile, read_into
from reprieve.testing import SlowDisk, run_ranks, values

_SHARED_BYTES = 10**9
"""On the real disk: each rank's bytes are counted, not timed."""
_THROTTLED_BYTES = 400_000_000
_THROTTLE = 60_000_000
"""Bytes per second and rank: a network volume, slow enough that four of them leave two cores idle at times."""


def figures(folder: Path, rounds: int) -> dict[str, float]:
    """The flat keys for results.json."""
    found: dict[str, float] = {}
    for ranks in (2, 4):
        print(f"ranks: {ranks} on this disk", file=sys.stderr)
        counts = [one["written"] for one in _run(ranks, _save, folder / f"shared-{ranks}", _SHARED_BYTES, None)]
        mean = sum(counts) / ranks
        found[f"ranks.{ranks}.bytes_off"] = max(abs(count - mean) for count in counts) / mean
    alone, together, each, shared = [], [], [], []
    for number in range(rounds):
        print(f"ranks: throttled, round {number + 1}/{rounds}", file=sys.stderr)
        one, four = folder / f"one-{number}", folder / f"four-{number}"
        alone.append(_slowest(_run(1, _save, one, _THROTTLED_BYTES, _THROTTLE)))
        together.append(_slowest(_run(4, _save, four, _THROTTLED_BYTES, _THROTTLE)))
        each.append(_slowest(_run(4, _restore, four, _THROTTLED_BYTES, _THROTTLE, False)))
        shared.append(_slowest(_run(4, _restore, four, _THROTTLED_BYTES, _THROTTLE, True)))
    found["save.1_rank_throttled_s"] = median(alone)
    found["save.4_ranks_throttled_s"] = median(together)
    found["save.ranks_x_quarter"] = median(together) / (median(alone) / 4)
    found["restore.ranks_speedup"] = median(each) / median(shared)
    return {key: round(value, 4) for key, value in found.items()}


def show(found: dict[str, float]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("several ranks", "", title="Ranks", title_justify="left")
    for ranks in (2, 4):
        off = found[f"ranks.{ranks}.bytes_off"]
        table.add_row(f"{ranks} ranks: bytes of one rank, at most off 1/{ranks} by", f"{off:.2%}")
    table.add_row(
        "4 ranks, a throttled file system each: save, × a quarter of one rank's", f"{found['save.ranks_x_quarter']:.2f}"
    )
    table.add_row("the same, restore: × as fast as if each read everything", f"{found['restore.ranks_speedup']:.2f}")
    Console(width=None if Console().is_terminal else 110).print(table)


def _run(ranks: int, job: Callable[..., Any], *args: object) -> list[dict[str, float]]:
    return values(run_ranks(ranks, job, *args, timeout="600s", group_timeout="300s"))


def _slowest(results: list[dict[str, float]]) -> float:
    return max(one["seconds"] for one in results)


# What the ranks run


class _Counting(Disk):
    def __init__(self) -> None:
        self.written = 0
        self._lock = threading.Lock()

    def write(self, file: OpenFile, data: memoryview, offset: int) -> None:
        with self._lock:
            self.written += len(data)
        super().write(file, data, offset)


class _CountingSlow(SlowDisk):
    written = 0


def _save(folder: Path, size: int, bytes_per_second: int | None) -> dict[str, float]:
    disk = _Counting() if bytes_per_second is None else _CountingSlow(bytes_per_second)
    state = _state(size)
    with Checkpointer(folder, disk=disk, name="bench", rng=False, **state.parts()) as saver:
        dist.barrier()
        before, start = disk.written, time.perf_counter()
        saver.save(1)
        return {"seconds": time.perf_counter() - start, "written": disk.written - before}


def _restore(folder: Path, size: int, bytes_per_second: int, together: bool) -> dict[str, float]:
    _throttle_reads(bytes_per_second)
    if not together:
        resume.ResumeJob._join_readers = lambda *_: (None, None)  # type: ignore[method-assign]
    state = _state(size)
    with Checkpointer(folder, name="bench", rng=False, **state.parts()) as saver:
        dist.barrier()
        start = time.perf_counter()
        saver.restore()
        return {"seconds": time.perf_counter() - start}


def _state(size: int) -> TrainingState:
    torch.set_num_threads(1)
    torch.manual_seed(0)  # replicas are equal
    return TrainingState(shape_of(size))


def _throttle_reads(bytes_per_second: int) -> None:
    lock, free_at = threading.Lock(), 0.0

    def slowly(file: OpenFile, buffer: memoryview, offset: int) -> int:
        nonlocal free_at
        with lock:
            free_at = max(free_at, time.monotonic()) + len(buffer) / bytes_per_second
            until = free_at
        done = read_into(file, buffer, offset)
        time.sleep(max(0.0, until - time.monotonic()))
        return done

    reader.read_into = slowly  # type: ignore[attr-defined]
