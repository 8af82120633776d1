"""`dcp.save` and `dcp.load`: Reprieve's StorageWriter and StorageReader against DCP's own, on one rank and on several.

The state is what FSDP2 and AdamW pass to DCP: every parameter and its two moments as DTensors sharded by rows, and a
step for each. Stock DCP does not flush what it writes: the benchmark does, and counts it. The disk's own time for the
same bytes is measured in between, in the same processes.

DCP itself needs 0.1 to 0.2 s to plan these 700 items whatever their size, before it calls any storage. That is why the
state is four times as large as that of the other figures.
"""

from __future__ import annotations

import ctypes
import gc
import os
import random
import shutil
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from benchmarks import disk
from benchmarks.measure import settle
from benchmarks.memory import _status_kib
from benchmarks.peers import flush
from benchmarks.state import Decoder, shape_of
from reprieve.testing import run_ranks, values

RANKS = (1, 2)
_WAYS = [disk.Way(threads, 16 * 2**20) for threads in (1, 2, 4)]
_STOCK_THREADS = 2
"""One per core of the machine that the figures come from: the better of `peers.dcp_1` and `peers.dcp_2`."""


def figures(folder: Path, rounds: int, size: int) -> dict[str, float]:
    """The flat keys for results.json: `dcp.<ranks>.…` are Reprieve's, `peers.stock.dcp.<ranks>.…` are DCP's own."""
    found: dict[str, float] = {}
    for ranks in RANKS:
        print(f"dcp: {ranks} rank{'s' * (ranks > 1)}", file=sys.stderr)
        found |= dcp_figures(folder / f"dcp-{ranks}", 4 * size, ranks, rounds)
    return found


def dcp_figures(folder: Path, size: int, ranks: int, rounds: int) -> dict[str, float]:
    """Medians; `…_x_disk` as a multiple of the disk's own time for the same bytes."""
    folder.mkdir()
    try:
        run = run_ranks(ranks, _rounds, folder, size, rounds, timeout="1200s", group_timeout="600s")
        times, extra_mib = values(run)[0]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    found = {f"dcp.{ranks}.save_extra_mib": extra_mib}
    for what in ("save", "load"):
        limit = min(median(seconds) for name, seconds in times.items() if name.startswith(f"disk {what}"))
        for who, prefix in (("ours", "dcp"), ("stock", "peers.stock.dcp")):
            seconds = median(times[f"{who} {what}"])
            found |= {f"{prefix}.{ranks}.{what}_s": seconds, f"{prefix}.{ranks}.{what}_x_disk": seconds / limit}
    return {key: round(value, 4) for key, value in found.items()}


def show(found: dict[str, float]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("DCP, durable", "ours, s", "× disk", "stock, s", "× disk", title="DCP", title_justify="left")
    for ranks in RANKS:
        for what in ("save", "load"):
            numbers = [
                found[f"{who}.{ranks}.{what}_{unit}"] for who in ("dcp", "peers.stock.dcp") for unit in ("s", "x_disk")
            ]
            table.add_row(f"{what}, {ranks} rank{'s' * (ranks > 1)}", *(f"{number:.2f}" for number in numbers))
    Console(width=None if Console().is_terminal else 110).print(table)


# What the ranks run


def _nothing() -> None:
    pass


class _Job(NamedTuple):
    run: Callable[[], object]
    before: Callable[[], object] = _nothing
    """Runs on rank 0, outside of the measured time."""


def _rounds(folder: Path, size: int, rounds: int) -> tuple[dict[str, list[float]], float]:
    """Return the seconds by job, and the memory that a process's first save took on this rank."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // dist.get_world_size()))  # as processes share them
    warnings.simplefilter("ignore")
    state = _state(size)
    total = sum(tensor.nbytes for tensor in state.values()) * dist.get_world_size()
    save, load = _ours()
    save_stock, load_stock = _stock()
    extra_mib = _extra_mib(partial(save, state, folder / "ours"))
    save_stock(state, folder / "stock")  # so that there is something to load
    jobs = {
        "ours save": _Job(partial(save, state, folder / "new"), partial(_remove, folder / "new")),
        "stock save": _Job(partial(save_stock, state, folder / "new"), partial(_remove, folder / "new")),
        "ours load": _Job(partial(load, state, folder / "ours")),
        "stock load": _Job(partial(load_stock, state, folder / "stock")),
        **_disk_jobs(folder / "raw", total),
    }
    times: dict[str, list[float]] = {name: [] for name in jobs}
    order = random.Random(0)
    for number in range(rounds):
        for name in order.sample(list(jobs), len(jobs)):
            seconds = _time(jobs[name])
            times[name].append(seconds)
            if dist.get_rank() == 0:
                print(f"round {number + 1}/{rounds} {name:28} {seconds:8.3f} s", file=sys.stderr)
    return times, extra_mib


def _ours() -> tuple[Callable[..., None], Callable[..., None]]:
    from torch.distributed.checkpoint.state_dict_loader import load
    from torch.distributed.checkpoint.state_dict_saver import save

    from reprieve.dcp import StorageReader, StorageWriter

    return (
        lambda state, path: save(state, storage_writer=StorageWriter(path)),
        lambda state, path: load(dict(state), storage_reader=StorageReader(path)),
    )


def _stock() -> tuple[Callable[..., None], Callable[..., None]]:
    from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
    from torch.distributed.checkpoint.state_dict_loader import load
    from torch.distributed.checkpoint.state_dict_saver import save

    def save_durably(state: dict[str, Any], path: Path) -> None:
        save(state, storage_writer=FileSystemWriter(path, thread_count=_STOCK_THREADS))
        if dist.get_rank() == 0:
            flush(path)

    return save_durably, lambda state, path: load(dict(state), storage_reader=FileSystemReader(path))


def _disk_jobs(raw: Path, size: int) -> dict[str, _Job]:
    """One process moves all the bytes: no number of ranks can be faster than the disk."""
    disk.touch_memory()

    def make_anew() -> None:
        raw.unlink(missing_ok=True)
        disk.create(raw, size)

    def make() -> None:
        if not raw.exists():
            make_anew()
            disk.write(raw, size, _WAYS[0])

    jobs = {}
    for way in _WAYS:
        jobs[f"disk save {way}"] = _Job(partial(_on_rank_0, partial(disk.write, raw, size, way)), make_anew)
        jobs[f"disk load {way}"] = _Job(partial(_on_rank_0, partial(disk.read, raw, size, way)), make)
    return jobs


def _on_rank_0(job: Callable[[], object]) -> None:
    if dist.get_rank() == 0:
        job()


def _remove(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)


def _time(job: _Job) -> float:
    dist.barrier()
    _on_rank_0(job.before)
    _on_rank_0(settle)
    dist.barrier()
    start = time.perf_counter()
    job.run()
    dist.barrier()
    return time.perf_counter() - start


def _extra_mib(save: Callable[[], object]) -> float:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5\n")
    before = _status_kib("VmRSS")
    save()
    return (_status_kib("VmHWM") - before) / 1024


def _state(size: int) -> dict[str, Any]:
    """Each rank's state: names and shapes are the same on all ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    with torch.device("meta"):
        model = Decoder(shape_of(size))
    state: dict[str, Any] = {}
    for name, whole in model.named_parameters():
        chunks = whole.chunk(dist.get_world_size())
        rows = chunks[dist.get_rank()].shape[0] if dist.get_rank() < len(chunks) else 0
        for part in ("model", "exp_avg", "exp_avg_sq"):
            local = torch.rand(rows, *whole.shape[1:])
            state[f"{part}.{name}"] = DTensor.from_local(
                local, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride()
            )
        state[f"step.{name}"] = torch.tensor(1.0)
    return state
