"""Saves from a GPU: Qwen2.5-1.5B's parameters in float32 with AdamW's state, 18.5 GB.

Standalone: it needs torch, xxhash and `PYTHONPATH=src`, and uses isal if it is installed. `--wheels FOLDER` unpacks the
wheels in it and puts them on the path, for a machine without a package index. Run it from the repository's root:

    PYTHONPATH=src python3 -m benchmarks.gpu_save --json $OUT/gpu.json --wheels wheels
    PYTHONPATH=src python3 -m benchmarks.gpu_save --device cpu --size small --json /tmp/gpu.json     # does it run?

At most two files of the state's size are on the disk at any time. Markdown goes to stdout.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import shutil
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from benchmarks import disk
from benchmarks.machine import machine, versions
from benchmarks.measure import rounds_in_time, settle

if TYPE_CHECKING:
    from benchmarks.state import TrainingState
    from reprieve import Checkpointer

STEP_S = 0.1
SEQUENCE = 1024
STEPS = 40
MOST_STEPS = 400
MOST_STEPS_S = 30  # a large model on a CPU takes seconds for each
WAYS = [disk.Way(threads, 16 * 2**20) for threads in (1, 2, 4)]


class Bench:
    """The values by name, one for each round, and the state and folder that they are measured with."""

    def __init__(self, state: TrainingState, folder: Path) -> None:
        self.state = state
        self.folder = folder
        self.values: dict[str, list[float]] = {}
        self.tokens = state.tokens(1, 16)
        self.step_number = 0

    def add(self, name: str, value: float) -> None:
        self.values.setdefault(name, []).append(value)
        print(f"{time.strftime('%H:%M:%S')}  {name:36} {value:9.3f}", file=sys.stderr, flush=True)

    def timed(self, name: str, work: Callable[[], object]) -> None:
        settle()
        self._synchronize()
        start = time.perf_counter()
        work()
        self._synchronize()
        self.add(name, time.perf_counter() - start)

    def _synchronize(self) -> None:
        if self.state.device.type == "cuda":
            torch.cuda.synchronize()

    # Training

    def step_s(self) -> float:
        """Run one training step, until the GPU is done with it."""
        start = time.perf_counter()
        self.state.train_step(self.tokens)
        self._synchronize()
        return time.perf_counter() - start

    def calibrate(self) -> None:
        """Choose the number of tokens so that a step takes about 100 ms."""
        if self.state.device.type == "cuda":
            sequences = 4
            for _ in range(3):
                self.tokens = self.state.tokens(sequences, SEQUENCE)
                took = median(self.step_s() for _ in range(5))
                sequences = max(1, round(sequences * STEP_S / took))
            self.tokens = self.state.tokens(sequences, SEQUENCE)
        for _ in range(3):
            self.step_s()

    def steps(self, name: str, *, going_on: Callable[[], bool] = lambda: True, most: int = STEPS) -> None:
        """Run up to `most` steps while something else is in progress."""
        times: list[float] = []
        while len(times) < most and sum(times) < MOST_STEPS_S and going_on():
            times.append(self.step_s())
        if not going_on():
            times = times[:-1]  # the last one ran beside it only in part
        if times:
            self.add(f"{name}_ms", 1000 * median(times))
            self.add(f"{name}_p95_ms", 1000 * sorted(times)[int(0.95 * len(times))])
            self.add(f"{name}_count", len(times))

    # One round of each

    def disk(self) -> None:
        path, size = self.folder / "disk", self.state.bytes
        for way in WAYS:
            path.unlink(missing_ok=True)
            disk.create(path, size)
            self.timed(f"disk write, {way}", lambda way=way: disk.write(path, size, way))  # type: ignore[misc]
        for way in WAYS:
            self.timed(f"disk read, {way}", lambda way=way: disk.read(path, size, way))  # type: ignore[misc]
        path.unlink()

    def next_step(self) -> int:
        self.step_number += 1
        return self.step_number

    def save_and_restore(self, checkpointer: Checkpointer) -> None:
        from benchmarks.state import fingerprint

        expected = fingerprint(self.state.tensors())
        self.timed("save_s", lambda: checkpointer.save(self.next_step()))
        checkpointer.wait()
        self.state.wipe()
        self.timed("restore_s", checkpointer.restore)
        self.check(expected, "restore after a blocking save")
        self.remove(checkpointer)

    def first_background(self, checkpointer: Checkpointer) -> None:
        """A background save in a process without staging memory."""
        settle()
        start = time.perf_counter()
        save = checkpointer.save(self.next_step(), background=True)
        self.add("background_first_blocked_s", save.blocked.total_seconds())
        save.wait()
        self.add("background_first_durable_s", time.perf_counter() - start)
        self.remove(checkpointer)

    def warm_up(self, checkpointer: Checkpointer) -> None:
        """Training while the staging memory is allocated, which the first save has started."""
        start = time.perf_counter()
        checkpointer.warm_up()
        self.steps("step_beside_warm_up", going_on=_memory_is_growing, most=MOST_STEPS)
        checkpointer.warm_up(wait=True)
        self.add("warm_up_s", time.perf_counter() - start)
        pool = checkpointer._pool
        self.add("blocks", pool.ready)
        self.add("blocks_pinned", sum(block.pinned for block in pool._free))

    def background(self, checkpointer: Checkpointer, *, verify: bool) -> None:
        from benchmarks.state import fingerprint

        settle()
        self.steps("step_alone")
        expected = fingerprint(self.state.tensors()) if verify else {}
        self._synchronize()
        start = time.perf_counter()
        save = checkpointer.save(self.next_step(), background=True)
        self.add("background_blocked_s", save.blocked.total_seconds())
        self.steps("step_beside_save", going_on=lambda: not save.done, most=MOST_STEPS)
        save.wait()
        self.add("background_durable_s", time.perf_counter() - start)
        checkpointer.wait()
        if verify:  # training continued meanwhile: is it the state at the return of save()?
            checkpointer.restore()
            self.check(expected, "restore after a background save")
        self.remove(checkpointer)

    def background_undisturbed(self, checkpointer: Checkpointer) -> None:
        """How long until it is durable when no training competes."""
        settle()
        start = time.perf_counter()
        checkpointer.save(self.next_step(), background=True).wait()
        self.add("background_durable_idle_s", time.perf_counter() - start)
        self.remove(checkpointer)

    def remove(self, checkpointer: Checkpointer) -> None:
        checkpointer.wait()
        for found in checkpointer.checkpoints():
            shutil.rmtree(found.path)

    def check(self, expected: dict[str, tuple[int, ...]], what: str) -> None:
        from benchmarks.state import fingerprint

        if fingerprint(self.state.tensors()) != expected:
            raise RuntimeError(f"{what}: not bit for bit what was saved")
        print(f"{what}: every bit is back", file=sys.stderr, flush=True)


def _memory_is_growing() -> bool:
    return any(thread.name == "reprieve-memory" for thread in threading.enumerate())


def run(bench: Bench, rounds: int, budget_s: float) -> int:
    """The number of rounds there was time for."""
    from reprieve import Checkpointer

    end, done = time.monotonic() + budget_s, 0
    bench.calibrate()
    with Checkpointer(bench.folder / "checkpoints", keep=1, **bench.state.parts()) as checkpointer:
        bench.first_background(checkpointer)
        bench.warm_up(checkpointer)
        for done in rounds_in_time(rounds, end):
            parts: list[Callable[[], None]] = [
                bench.disk,
                lambda: bench.save_and_restore(checkpointer),
                lambda first=done == 1: bench.background(checkpointer, verify=first),  # type: ignore[misc]
                lambda: bench.background_undisturbed(checkpointer),
            ]
            for part in parts[(done - 1) % 2 :] + parts[: (done - 1) % 2]:
                part()
    return done


def summarize(values: dict[str, list[float]], size: int) -> dict[str, Any]:
    found: dict[str, Any] = {name: round(median(numbers), 4) for name, numbers in values.items()}
    for verb in ("write", "read"):
        name = min((name for name in found if name.startswith(f"disk {verb}")), key=lambda name: found[name])
        found |= {f"disk_{verb}_s": found[name], f"disk_{verb}_how": name}
        found[f"disk_{verb}_gb_s"] = round(size / found[name] / 1e9, 3)
    for name in ("save_s", "background_durable_s", "background_durable_idle_s"):
        found[name.removesuffix("_s") + "_x_disk"] = round(found[name] / found["disk_write_s"], 3)
    found["restore_x_disk"] = round(found["restore_s"] / found["disk_read_s"], 3)
    for name in ("save", "warm_up"):
        if f"step_beside_{name}_ms" in found:
            slower = found[f"step_beside_{name}_ms"] / found["step_alone_ms"] - 1
            found[f"step_beside_{name}_slower_percent"] = round(100 * slower, 2)
    return found


_ROWS = (
    ("the disk itself, write", "disk_write_s", ""),
    ("save, blocking, durable", "save_s", "save_x_disk"),
    ("background save, until durable, idle GPU", "background_durable_idle_s", "background_durable_idle_x_disk"),
    ("background save, until durable, beside training", "background_durable_s", "background_durable_x_disk"),
    ("background save, training blocked: first", "background_first_blocked_s", ""),
    ("background save, training blocked: warm", "background_blocked_s", ""),
    ("warm-up of memory after that first save, beside training", "warm_up_s", ""),
    ("the disk itself, read", "disk_read_s", ""),
    ("restore, verified", "restore_s", "restore_x_disk"),
)


def markdown(found: dict[str, Any], values: dict[str, list[float]], size: int) -> str:
    lines = [f"| {size / 1e9:.2f} GB | seconds | all rounds | GB/s | × disk |", "| --- | --- | --- | --- | --- |"]
    for label, key, ratio in _ROWS:
        rounds = " ".join(f"{value:.3f}" for value in values.get(key) or values[found[key.removesuffix("_s") + "_how"]])
        times = f"{found[ratio]:.2f}" if ratio else ""
        lines.append(f"| {label} | {found[key]:.3f} | {rounds} | {size / found[key] / 1e9:.2f} | {times} |")
    lines += ["", "| step | ms | p95 | steps | slower |", "| --- | --- | --- | --- | --- |"]
    for name in ("alone", "beside_save", "beside_warm_up"):
        step = f"step_{name}"
        if f"{step}_ms" in found:
            slower = f"{found[f'{step}_slower_percent']:+.1f} %" if f"{step}_slower_percent" in found else ""
            numbers = f"{found[f'{step}_ms']:.1f} | {found[f'{step}_p95_ms']:.1f} | {found[f'{step}_count']:.0f}"
            lines.append(f"| {name.replace('_', ' ')} | {numbers} | {slower} |")
    return "\n".join(lines)


def _unpack_wheels(folder: Path, into: Path) -> None:
    for wheel in sorted(folder.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(into)
    sys.path[:0] = [str(folder), str(into)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--size", choices=("qwen", "small"), default="qwen")
    parser.add_argument("--layers", type=int, help="fewer layers than the model has")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--budget-s", type=float, default=420, help="no new round that would end after this (420)")
    parser.add_argument("--folder", type=Path, help="where to write (the current folder)")
    parser.add_argument("--wheels", type=Path, help="a folder of wheels, or of packages, for sys.path")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO)  # the engine logs what it could not do
    with tempfile.TemporaryDirectory(dir=options.folder or Path.cwd(), prefix="gpu-save-") as temporary:
        folder = Path(temporary)
        if options.wheels is not None:
            _unpack_wheels(options.wheels, folder / "wheels")
        from benchmarks.state import QWEN2_5_1_5B, SMALL, TrainingState

        shape = QWEN2_5_1_5B if options.size == "qwen" else SMALL
        if options.layers is not None:
            shape = dataclasses.replace(shape, layers=options.layers)
        disk.touch_memory()
        bench = Bench(TrainingState(shape, options.device), folder)
        size = bench.state.bytes
        try:
            rounds = run(bench, options.rounds, options.budget_s)
        finally:  # keep the results so far if the rest fails
            options.json.write_text(json.dumps({"all": bench.values}, indent=2) + "\n")
        where = machine(folder)
    found = summarize(bench.values, size)
    print(markdown(found, bench.values, size))
    gpu = torch.cuda.get_device_name() if options.device == "cuda" else None
    about: dict[str, Any] = {"bytes": size, "rounds": rounds, "tokens_per_step": bench.tokens.numel(), "gpu": gpu}
    about |= {"machine": where, "versions": versions(), "shape": dataclasses.asdict(shape)}
    options.json.write_text(json.dumps({**about, **found, "all": bench.values}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
