"""`python -m benchmarks`: measure Reprieve, its peers and the disk on this machine. The table goes to stdout.

python -m benchmarks                              everything, 2 GB, 5 rounds (15 of Reprieve and the disk): half an hour
python -m benchmarks --only save,peers.dcp_2      only these (and the limit they are compared with); other keys stay
python -m benchmarks --only ranks,dcp,step        several ranks; DCP with Reprieve's storage; the common step
python -m benchmarks --only stop                  SIGTERM, and what a step costs: about 4 minutes
python -m benchmarks --only launch                what the launcher costs, and how soon a resumed run trains
python -m benchmarks --only hf                    what a step of a protected transformers.Trainer costs
python -m benchmarks --only ray                   stops of a run on Ray, with Reprieve and without: about 3 minutes
python -m benchmarks --only admission             how long the webhook takes to answer for a TrainJob
python -m benchmarks --only operator              a thousand TrainJobs on the test cluster (Linux, root): 8 minutes
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from benchmarks import (
    admission,
    common_step,
    dcp,
    disk,
    engine,
    hf_hooks,
    launch,
    peers,
    ranks,
    ray_train,
    results,
    stop,
)
from benchmarks.measure import Job, Times, can_drop_caches, measure
from benchmarks.memory import OURS, extra_mib
from benchmarks.state import TrainingState, shape_of
from reprieve.units import format_size, parse_size

ROOT = Path(__file__).parents[1]
CLOSER = 2
"""How many times as many rounds these get as the peers: see `_closer`."""


def main() -> int:
    options = _options()
    logging.basicConfig(level=logging.WARNING)
    if not can_drop_caches():
        print("not root: the page cache stays warm, and restores of peers look faster than they are", file=sys.stderr)
    folder = _folder(options.folder)
    try:
        return _run(options, folder)
    finally:
        shutil.rmtree(folder)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser("benchmarks", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--size", type=parse_size, default=parse_size("2GB"), help="model and optimizer (2GB)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where to write: a new folder in it, removed at the end")
    parser.add_argument("--only", type=lambda text: text.split(","), help="names, or how they start: save,peers.hf")
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks" / "results.json")
    return parser.parse_args()


def _folder(parent: Path | None) -> Path:
    parent = parent or ROOT / ".work"
    parent.mkdir(exist_ok=True)
    return Path(tempfile.mkdtemp(prefix="benchmarks-", dir=parent))


def _run(options: argparse.Namespace, folder: Path) -> int:
    print(f"making a state of {format_size(options.size)} in {folder}", file=sys.stderr)
    state = TrainingState(shape_of(options.size))
    needed, free = state.bytes * (len(peers.PEERS) + 4), shutil.disk_usage(folder).free
    if needed > free:
        print(f"{folder} has {format_size(free)} free, {format_size(needed)} are needed", file=sys.stderr)
        return 1
    ours, close = engine.jobs(folder, state)
    every = [*disk.jobs(folder, state.bytes), *ours, *peers.jobs(folder, state)]
    memory_names = {f"{_prefix(name)}save.extra_mib": name for name in [OURS, *_saving_peers()]}
    chosen, memory = _choose(every, list(memory_names), options.only)
    parts = [name for name in PARTS if options.only is None or name in options.only]
    if not chosen and not memory and not parts:
        known = sorted({*(job.name for job in every), *memory_names, *PARTS})
        print(f"nothing is called {','.join(options.only)}. There is:\n  " + "\n  ".join(known), file=sys.stderr)
        return 2
    try:
        times = measure(chosen, options.rounds)
        if closer := _closer(chosen, times):
            measure(closer, CLOSER * options.rounds, so_far=times)
    finally:
        close()
    extra = {}
    for key in memory:
        print(f"memory: {key}", file=sys.stderr)
        extra[key] = extra_mib(memory_names[key], state.bytes, memory_folder := folder / "memory")
        shutil.rmtree(memory_folder)
    found = results.collect(chosen, times, extra)
    if chosen:
        found |= {"state.bytes": state.bytes, "rounds": options.rounds}
        results.show(chosen, times, found)
    del state, every, ours, chosen  # several ranks need the memory
    for name in parts:
        found |= PARTS[name](folder, options)
    results.write(options.json, found, folder)
    print(f"wrote {os.path.relpath(options.json)}", file=sys.stderr)
    return 0


def _closer(jobs: list[Job], times: Mapping[str, Times]) -> list[Job]:
    """Reprieve's save and restore, and the disk: too close to each other to distinguish in a few rounds."""
    ours = [job for job in jobs if job.name in ("save", "restore")]
    limits = [results.best_of(job.limit, jobs, times) for job in ours]
    return [*filter(None, limits), *ours]


def _ranks(folder: Path, options: argparse.Namespace) -> dict[str, float]:
    found = ranks.figures(folder, options.rounds)
    ranks.show(found)
    return found


def _dcp(folder: Path, options: argparse.Namespace) -> dict[str, float]:
    found = dcp.figures(folder, options.rounds, options.size)
    dcp.show(found)
    return found


def _step(_folder: Path, _options: argparse.Namespace) -> dict[str, float]:
    print("step: 4 ranks with nothing to do", file=sys.stderr)
    cost = common_step.steady_cost()
    print(f"a step in a job of 4 ranks, nothing asked: {cost.boundary_us:.2f} µs, {cost.collectives} collectives")
    return {"step.ranks_overhead_us": round(cost.boundary_us, 3), "step.ranks_collectives": cost.collectives}


def _stop(folder: Path, options: argparse.Namespace) -> dict[str, float]:
    found = stop.figures(folder, options.rounds, options.size)
    stop.show(found)
    return found


def _launch(folder: Path, options: argparse.Namespace) -> dict[str, float]:
    found = launch.figures(folder, options.rounds, options.size)
    launch.show(found)
    return found


def _hf(_folder: Path, _options: argparse.Namespace) -> dict[str, float]:
    print("hf: a trainer with nothing to do", file=sys.stderr)
    found = hf_hooks.figures()
    hf_hooks.show(found)
    return found


def _ray(folder: Path, _options: argparse.Namespace) -> dict[str, float]:
    print("ray: stops of a worker, with Reprieve and without", file=sys.stderr)
    found = ray_train.figures(folder)
    ray_train.show(found)
    return found


def _operator(_folder: Path, _options: argparse.Namespace) -> dict[str, float]:
    from benchmarks import operator  # needs the test cluster

    found = operator.figures()
    operator.show(found)
    return found


def _admission(_folder: Path, _options: argparse.Namespace) -> dict[str, float]:
    found = admission.figures()
    admission.show(found)
    return found


PARTS = {
    "ranks": _ranks,
    "dcp": _dcp,
    "step": _step,
    "stop": _stop,
    "launch": _launch,
    "hf": _hf,
    "ray": _ray,
    "admission": _admission,
    "operator": _operator,
}
"""The figures that are measured in separate processes."""


def _prefix(name: str) -> str:
    return "" if name == OURS else f"peers.{name}."


def _saving_peers() -> list[str]:
    return [name for name, peer in peers.PEERS.items() if peer.saves]


def _choose(every: list[Job], memory: list[str], only: list[str] | None) -> tuple[list[Job], list[str]]:
    """The requested jobs, and those that they are compared with."""
    if only is None:
        return every, memory
    asked = [job for job in every if job.is_below(only)]
    limits = {job.limit for job in asked if job.limit}
    if any(job.name == "save.background" for job in asked):
        limits.add("memcpy")
    chosen = [job for job in every if job in asked or job.is_below(limits)]
    return chosen, [key for key in memory if any(key == name or key.startswith(f"{name}.") for name in only)]


if __name__ == "__main__":
    sys.exit(main())
