"""The driver of `ray_train.py`: a small run on Ray whose rank 1 gets SIGTERM. Arguments: FOLDER STOPS PLAIN.

PLAIN is 1 for a run without Reprieve. Rank 0 writes what it saw to FOLDER/log, a JSON object a line.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

STEP_S = 0.025
EVERY = 10
"""Steps between two periodic checkpoints."""
CALLS = 20_000
"""Steps with nothing but Reprieve in them, which are timed."""
IDLE_S = 10.0
"""How long our threads are watched while nothing happens."""


def step_us() -> float:
    """Return the CPU time of a step: should_checkpoint(), and what we add to ray.train.report()."""
    from reprieve.adapters.ray import worker
    from reprieve.ray import should_checkpoint

    assert worker._worker is not None
    report = worker._worker.reports.wrap(lambda *_args, **_options: None)
    began = time.thread_time()
    for step in range(CALLS):
        should_checkpoint()
        report({"step": step})
    return 1e6 * (time.thread_time() - began) / CALLS


def background_us() -> float:
    """Return the CPU time of our threads in a second in which nothing happens."""
    began = _background_ns()
    time.sleep(IDLE_S)
    return (_background_ns() - began) / 1000 / IDLE_S


def _background_ns() -> int:
    ours = [thread.native_id for thread in threading.enumerate() if thread.name.startswith("reprieve")]
    return sum(int(Path(f"/proc/self/task/{number}/schedstat").read_text().split()[0]) for number in ours)


def train_func(config: dict[str, Any]) -> None:
    import torch
    from ray import train
    from ray.train import Checkpoint
    from torch import distributed

    from reprieve.ray import should_checkpoint

    folder, stops, plain = Path(config["folder"]), config["stops"], config["plain"]
    rank = train.get_context().get_world_rank()

    def log(**line: Any) -> None:
        if rank == 0:
            with (folder / "log").open("a") as file:
                file.write(json.dumps(line) + "\n")

    start = 0
    if checkpoint := train.get_checkpoint():
        with checkpoint.as_directory() as saved:
            start = torch.load(f"{saved}/step.pt") + 1
    log(started=start)
    weights = torch.zeros(1_000_000)
    done = len(list(folder.glob("signal-*")))
    if not plain and done == stops:
        log(step_us=step_us(), background_us=background_us())
    for step in range(start, start + 10_000):
        time.sleep(STEP_S)
        distributed.all_reduce(torch.ones(1))
        if step == start + EVERY // 2 + EVERY and done < stops and rank == 1:
            (folder / f"signal-{done}").write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGTERM)
        if done == stops and step == start + EVERY:
            return
        due = not plain and should_checkpoint()
        log(step=step)
        if not due and step % EVERY:
            train.report({"step": step})
            continue
        began = time.time()
        with tempfile.TemporaryDirectory() as made:
            torch.save(weights, f"{made}/weights.pt")
            torch.save(step, f"{made}/step.pt")
            saved_s = time.time() - began
            try:
                train.report({"step": step}, checkpoint=Checkpoint.from_directory(made) if rank == 0 else None)
            finally:
                if due:
                    log(committed=time.time(), save_s=saved_s, stop=done)


def main() -> None:
    import ray
    import ray.train
    from ray.train import FailureConfig, ScalingConfig, UserCallback
    from ray.train.torch import TorchTrainer

    from reprieve.ray import JITCheckpointConfig, RunConfig

    folder, stops, plain = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "1"

    class CountFailures(UserCallback):
        """Writes a line for each failure that Ray sees."""

        def after_exception(self, run_context: Any, worker_exceptions: Any) -> None:
            with Path(folder, "failures").open("a") as file:
                file.write(f"{sorted(worker_exceptions)}\n")

    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    failures = FailureConfig(max_failures=stops if plain else 0)
    common: dict[str, Any] = {
        "name": "run",
        "storage_path": folder,
        "failure_config": failures,
        "callbacks": [CountFailures()],
    }
    run_config = (
        ray.train.RunConfig(**common)
        if plain
        else RunConfig(**common, jit_checkpoint_config=JITCheckpointConfig(enabled=True, kill_wait=0))
    )
    TorchTrainer(
        train_func,
        train_loop_config={"folder": folder, "stops": stops, "plain": plain},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=run_config,
    ).fit()


if __name__ == "__main__":
    main()
