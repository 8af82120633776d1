"""SIGTERM to a training on a GPU: how soon 18.5 GB are durable, and whether the training ends bit for bit the same.

Standalone, as `gpu_save` is, and with the same `--wheels`. Run it from the repository's root:

    PYTHONPATH=src python3 -m benchmarks.gpu_stop --json $OUT/stop.json --wheels wheels
    PYTHONPATH=src python3 -m benchmarks.gpu_stop --tiny --json /tmp/stop.json     # on a CPU: does it run?

Every round is a new process that trains under `reprieve.Run` and gets the signal at a random moment of a step. At most
one file of the state's size is on the disk at any time. Markdown goes to stdout.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks import disk, gpu_exact
from benchmarks.gpu_save import _unpack_wheels
from benchmarks.machine import machine, versions
from benchmarks.measure import rounds_in_time, settle
from benchmarks.stop_process import Stopped, stop

PREEMPTED = 143
WAYS = [disk.Way(threads, 16 * 2**20) for threads in (1, 2, 4)]


class Bench:
    """The seconds by name, one for each round."""

    def __init__(self, folder: Path, shape: dict[str, int], device: str, seed: int) -> None:
        self.folder = folder
        self.shape = shape
        self.device = device
        self.moments = random.Random(seed)
        self.values: dict[str, list[float]] = {}
        self.bytes = 0

    def add(self, name: str, value: float) -> None:
        self.values.setdefault(name, []).append(value)
        print(f"{time.strftime('%H:%M:%S')}  {name:36} {value:9.3f}", file=sys.stderr, flush=True)

    def stop(self) -> None:
        folder = self.folder / "job"
        folder.mkdir()
        given = json.dumps({"folder": str(folder), "shape": self.shape, "device": self.device})
        settle()
        # REPRIEVE_GRACE: nothing kills this process, whatever the platform's default is.
        done: Stopped = stop(
            ["benchmarks.stop_jobs", "ours", given],
            folder,
            self.moments.uniform(1, 1.5),
            env={"REPRIEVE_GRACE": "10m"},
        )
        shutil.rmtree(folder)
        if done.exit_codes != [PREEMPTED]:
            raise RuntimeError(f"exit code {done.exit_codes[0]}, not {PREEMPTED}")
        self.bytes = int(done.notes[0]["bytes"])
        self.add("step_s", done.step_s)
        self.add("reaction_ms", done.reaction_ms)
        self.add("durable_s", done.durable_s)
        self.add("exit_s", done.exit_s)

    def disk(self) -> None:
        path = self.folder / "disk"
        for way in WAYS:
            disk.create(path, self.bytes)
            settle()
            start = time.perf_counter()
            disk.write(path, self.bytes, way)
            self.add(f"disk write, {way}", time.perf_counter() - start)
            path.unlink()


def run(bench: Bench, rounds: int, budget_s: float) -> int:
    """The number of rounds there was time for."""
    done = 0
    for number in rounds_in_time(rounds, time.monotonic() + budget_s):
        bench.stop()
        bench.disk()
        done = number
    return done


def summarize(values: dict[str, list[float]]) -> dict[str, Any]:
    found: dict[str, Any] = {name: round(median(numbers), 4) for name, numbers in values.items()}
    how = min((name for name in found if name.startswith("disk write")), key=lambda name: found[name])
    found |= {"disk_write_s": found[how], "disk_write_how": how}
    found["x_disk"] = round(found["durable_s"] / (found["disk_write_s"] + found["step_s"]), 3)
    return found


def markdown(found: dict[str, Any], values: dict[str, list[float]], size: int) -> str:
    lines = [f"| {size / 1e9:.2f} GB, SIGTERM | median | all rounds |", "| --- | --- | --- |"]
    for label, key in (
        ("the disk itself, s", found["disk_write_how"]),
        ("one step, s", "step_s"),
        ("until the save begins, less the rest of the step, ms", "reaction_ms"),
        ("until durable, s", "durable_s"),
        ("until the process has ended, s", "exit_s"),
    ):
        lines.append(f"| {label} | {found[key]:.3f} | {' '.join(f'{value:.3f}' for value in values[key])} |")
    lines.append(f"| until durable, × (the disk itself + one step) | {found['x_disk']:.2f} | |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--tiny", action="store_true", help="a small model on the CPU: does it run?")
    parser.add_argument("--only", choices=("stop", "exact"), help="one of the two")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0, help="of the moments at which signals come (0)")
    parser.add_argument("--budget-s", type=float, default=300, help="no new round that would end after this (300)")
    parser.add_argument("--folder", type=Path, help="where to write (the current folder)")
    parser.add_argument("--wheels", type=Path, help="a folder of wheels, or of packages, for sys.path")
    options = parser.parse_args()
    device = "cpu" if options.tiny else "cuda"
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=options.folder or Path.cwd(), prefix="gpu-stop-") as temporary:
        folder = Path(temporary).resolve()
        if options.wheels is not None:
            _unpack_wheels(options.wheels.resolve(), folder / "wheels")
        from benchmarks.state import QWEN2_5_1_5B, SMALL

        shape = dataclasses.asdict(SMALL if options.tiny else QWEN2_5_1_5B)
        bench = Bench(folder, shape, device, options.seed)
        try:
            if options.only != "stop":
                found["exact"] = gpu_exact.compare(folder / "exact", device, random.Random(options.seed))
                print(gpu_exact.markdown(found["exact"]), flush=True)
            if options.only != "exact":
                disk.touch_memory()
                found["rounds"] = run(bench, options.rounds, options.budget_s)
                found |= {"bytes": bench.bytes, "shape": shape, **summarize(bench.values)}
                print(markdown(found, bench.values, bench.bytes))
        finally:  # keep the results so far if the rest fails
            found |= {"gpu": torch.cuda.get_device_name() if device == "cuda" else None, "all": bench.values}
            found |= {"machine": machine(folder), "versions": versions()}
            options.json.write_text(json.dumps(found, indent=2) + "\n")
    return 0 if all(one["equal"] for one in found.get("exact", {}).values()) else 1


if __name__ == "__main__":
    sys.exit(main())
