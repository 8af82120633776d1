"""SIGTERM: how soon the save begins, how soon it is durable, and what a step costs without a stop request.

Real processes, real signals at random moments of steps of known length. `stop.reaction_ms` is the time from the signal
to the start of the save, less the rest of the step that was running. One rank of the job gets the signal, and the
others learn of it from that one. `stop.x_disk` is the time from the signal until the state is durable, divided by the
unavoidable part: one step, and the disk's own time for the bytes. The peer is transformers' own JIT checkpoint.
"""

from __future__ import annotations

import dataclasses
import json
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import disk, step_overhead, stop_jobs
from benchmarks.measure import settle
from benchmarks.state import shape_of
from benchmarks.stop_process import Stopped, read_notes, stop, wait_until_training
from reprieve.testing import start_ranks

RANKS = (1, 2, 4)
STOPS = 20
"""Stops for each number of ranks."""
PEER_ROUNDS = 3
"""The most stops of the peer: each takes 20 s, and its reaction alone 3 s."""
PREEMPTED = 143
PEER = "peers.transformers_jit."
_WAYS = [disk.Way(threads, 16 * 2**20) for threads in (1, 2, 4)]


def figures(folder: Path, rounds: int, size: int, stops: int = STOPS) -> dict[str, float]:
    """The flat keys for results.json. Half of `size` is saved: every stop takes a new process, which creates it."""
    folder = folder / "stop"
    folder.mkdir()
    moments = random.Random(0)
    try:
        found = step_overhead.figures(folder)
        found |= reaction(folder, stops, moments)
        found |= durable(folder, rounds, size // 2, moments)
    finally:
        shutil.rmtree(folder)
    return {key: round(value, 4) for key, value in found.items()}


def reaction(folder: Path, stops: int, moments: random.Random) -> dict[str, float]:
    """The medians by the number of ranks, and the largest of them."""
    found = {}
    for ranks in RANKS:
        times = [stop_ranks(folder / f"ranks-{ranks}-{n}", ranks, moments).reaction_ms for n in range(stops)]
        shown = " ".join(f"{one:.1f}" for one in sorted(times))
        print(f"stop: {ranks} rank{'s' * (ranks > 1)}, reaction in ms: {shown}", file=sys.stderr)
        found[f"stop.{ranks}.reaction_ms"] = median(times)
    return {"stop.reaction_ms": max(found.values()), **found}


def stop_ranks(folder: Path, ranks: int, moments: random.Random) -> Stopped:
    """A job of several ranks, of which one gets the signal."""
    folder.mkdir()
    with start_ranks(ranks, stop_jobs.tiny, folder, env={"REPRIEVE_GRACE": None}) as running:
        wait_until_training(folder, ranks, lambda: True, limit_s=60)
        time.sleep(moments.uniform(0, 3 * stop_jobs.STEP_S))
        signalled = time.monotonic()
        running.signal(moments.randrange(ranks), signal.SIGTERM)
        results = running.wait()
        exited = time.monotonic()
    codes = [one.exit_code for one in results]
    if codes != [PREEMPTED] * ranks:
        raise RuntimeError(f"{ranks} ranks exited with {codes}:\n{results[0].output}")
    stopped = Stopped(signalled, exited, codes, read_notes(folder, ranks))
    shutil.rmtree(folder)
    return stopped


def durable(folder: Path, rounds: int, size: int, moments: random.Random) -> dict[str, float]:
    shape = dataclasses.asdict(shape_of(size))
    ours: list[Stopped] = []
    theirs: list[Stopped] = []
    disk_s: dict[str, list[float]] = {}

    def stop_peer() -> None:
        theirs.append(_stop("transformers", folder, shape, moments))

    jobs: list[Callable[[], None]] = [
        lambda: ours.append(_stop("ours", folder, shape, moments)),
        *(partial(_disk, folder / "raw", size, way, disk_s) for way in _WAYS),
    ]
    disk.touch_memory()
    for number in range(rounds):
        print(f"stop: round {number + 1}/{rounds}", file=sys.stderr)
        chosen = [*jobs, stop_peer] if number < PEER_ROUNDS else jobs
        for job in moments.sample(chosen, len(chosen)):
            settle()
            job()
    limit_s = min(median(seconds) for seconds in disk_s.values())
    return {
        "stop.disk_s": limit_s,
        **_summary("", ours, limit_s / size),
        **_summary(PEER, theirs, limit_s / size),
    }


def _summary(prefix: str, stopped: list[Stopped], disk_s_per_byte: float) -> dict[str, float]:
    size = stopped[0].notes[0]["bytes"]
    durable_s = median(one.durable_s for one in stopped)
    limit_s = disk_s_per_byte * size + median(one.step_s for one in stopped)
    found: dict[str, float] = {
        "stop.bytes": size,
        "stop.s": durable_s,
        "stop.exit_s": median(one.exit_s for one in stopped),
        "stop.x_disk": durable_s / limit_s,
    }
    if prefix:  # Reprieve's is measured with more stops
        found["stop.reaction_ms"] = median(one.reaction_ms for one in stopped)
    return {f"{prefix}{key}": value for key, value in found.items()}


def _stop(name: str, folder: Path, shape: Mapping[str, Any], moments: random.Random) -> Stopped:
    folder = folder / name
    folder.mkdir()
    given = json.dumps({"folder": str(folder), "shape": shape})
    env = {"HF_HUB_OFFLINE": "1", "REPRIEVE_GRACE": "10m"}
    stopped = stop(["benchmarks.stop_jobs", name, given], folder, moments.uniform(0.5, 0.6), env=env)
    shutil.rmtree(folder)
    expected = PREEMPTED if name == "ours" else 0  # to their callers a stopped training looks like a finished one
    if stopped.exit_codes != [expected]:
        raise RuntimeError(f"{name} exited with {stopped.exit_codes[0]}")
    print(f"stop: {name:14} durable {stopped.durable_s:.3f} s, exit {stopped.exit_s:.3f} s", file=sys.stderr)
    return stopped


def _disk(path: Path, size: int, way: disk.Way, times: dict[str, list[float]]) -> None:
    disk.create(path, size)
    start = time.perf_counter()
    disk.write(path, size, way)
    times.setdefault(str(way), []).append(time.perf_counter() - start)
    path.unlink()


def show(found: Mapping[str, float]) -> None:
    from rich.console import Console
    from rich.table import Table

    title = f"Stop ({found['stop.bytes'] / 1e9:.2f} GB)"
    table = Table("SIGTERM", "Reprieve", "transformers JIT", title=title, title_justify="left")
    for label, key in (
        ("until the save begins, less the rest of the step, ms", "stop.reaction_ms"),
        ("until durable, s", "stop.s"),
        ("the same, × (the disk itself + one step)", "stop.x_disk"),
        ("until the process has ended, s", "stop.exit_s"),
    ):
        table.add_row(label, f"{found[key]:.2f}", f"{found[PEER + key]:.2f}")
    for ranks in RANKS:
        table.add_row(
            f"until the save begins, {ranks} rank{'s' * (ranks > 1)}, ms",
            f"{found[f'stop.{ranks}.reaction_ms']:.2f}",
            "",
        )
    for name, (ranks, workers) in step_overhead.CASES.items():
        label = f"a step, nothing asked: {ranks} rank{'s' * (ranks > 1)}, {workers} workers, µs"
        table.add_row(label, f"{found[f'step.{name}.overhead_us']:.1f}", "")
    Console(width=None if Console().is_terminal else 110).print(table)
