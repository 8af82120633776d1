"""A run on Ray, and what stops it: the driver of the tests of `reprieve.ray`. The argument is `RayOptions` as JSON.

Each worker writes a line for every step to a file. Rank 0 carries out the disruptions of the plan, one after the other,
exactly at the moment that they name: `{"at": "forward", "step": 7, "target": "rank 1"}`. Each happens once in a run.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

MOMENTS = ("forward", "report", "before the first step", "upload", "last step")
TARGETS = ("rank 0", "rank 1", "all", "driver", "drain")


@dataclass(kw_only=True)
class RayOptions:
    """What the run does."""

    folder: str
    name: str = "run"
    way: str = "should_checkpoint"
    """Who saves: `should_checkpoint`, `run` (reprieve.ray.Run), `document` (periodic reports only)."""
    workers: int = 2
    steps: int = 12
    step_s: float = 0.0
    every: int = 5
    kill_wait: float = 0.0
    grace: float | None = None
    plan: list[dict[str, Any]] = field(default_factory=list)
    backend: str = "torch"
    max_failures: int = 0
    preemption_grace_s: float = 0.0
    save_s: float = 0.0
    """How long a save takes at least."""
    resource: str | None = None
    """What each worker needs, instead of a CPU."""
    plain: bool = False
    """Without Reprieve: what Ray itself does."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))


class Worker:
    """One worker of the run, in the training function."""

    def __init__(self, options: RayOptions) -> None:
        import ray
        from ray import train

        context = train.get_context()
        self.options = options
        self.rank, self.world_size = context.get_world_rank(), context.get_world_size()
        self.folder = Path(options.folder)
        (self.folder / f"node-{self.rank}").write_text(ray.get_runtime_context().get_node_id())
        (self.folder / f"pid-{self.rank}").write_text(str(os.getpid()))

    def log(self, **line: Any) -> None:
        with (self.folder / f"log-{self.rank}").open("a") as file:
            file.write(json.dumps({"at": time.time(), **line}) + "\n")

    def reach(self, moment: str, step: int) -> None:
        """Carry out the next disruption of the plan, if this is its moment, or if its moment has passed."""
        if self.rank:
            return
        for number, entry in enumerate(self.options.plan):
            done = self.folder / f"done-{number}"
            if done.exists():
                continue
            if entry["at"] == moment and step >= entry.get("step", 0):
                done.touch()
                self.log(disruption=entry, step=step)
                self.disrupt(entry["target"])
            return

    def disrupt(self, target: str) -> None:
        number = signal.SIGTERM
        if target.endswith("SIGKILL"):
            number, target = signal.SIGKILL, target.removesuffix(" SIGKILL")
        if target == "driver":
            os.kill(int((self.folder / "pid-driver").read_text()), number)
        elif target == "all":
            for rank in reversed(range(self.world_size)):
                os.kill(self.pid(rank), number)
        elif target == "drain":
            drain(self.other_node())
        else:
            os.kill(self.pid(int(target.removeprefix("rank "))), number)

    def other_node(self) -> str:
        """A node of the run that is not the driver's."""
        import ray

        own = (self.folder / "node-driver").read_text()
        nodes = {(self.folder / f"node-{rank}").read_text() for rank in range(self.world_size)} - {own}
        assert nodes, f"all workers are on the driver's node; nodes: {[node['NodeID'] for node in ray.nodes()]}"
        return sorted(nodes)[0]

    def pid(self, rank: int) -> int:
        path = self.folder / f"pid-{rank}"
        while not path.exists():
            time.sleep(0.01)
        return int(path.read_text())


def drain(node: str) -> None:
    """Drain a node, as `ray drain-node` and an autoscaler do before a spot machine is taken away."""
    import ray
    from ray._raylet import GcsClient
    from ray.core.generated.autoscaler_pb2 import DrainNodeReason

    client = GcsClient(address=ray.get_runtime_context().gcs_address)
    reason = DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    accepted, message = client.drain_node(node, reason, "spot", round(1000 * (time.time() + 60)))
    assert accepted, message


def batch(step: int, rank: int) -> Any:
    import torch

    return torch.randn(8, 4, generator=torch.Generator().manual_seed(1000 * step + rank))


def add_up(gradient: Any) -> None:
    """Add up the gradients of all workers in the order of ranks, so that they depend on each other in every step."""
    import torch
    from torch import distributed

    if distributed.is_initialized():
        parts = [torch.empty_like(gradient) for _ in range(distributed.get_world_size())]
        distributed.all_gather(parts, gradient)
        gradient.copy_(parts[0])
        for part in parts[1:]:
            gradient += part


def train_step(model: Any, optimizer: Any, worker: Worker, step: int) -> float:
    loss = (model(batch(step, worker.rank)) ** 2).mean()
    worker.reach("forward", step)
    loss.backward()
    for parameter in model.parameters():
        add_up(parameter.grad)
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(worker.options.step_s)
    return float(loss.item())


def own_saves(options: RayOptions) -> None:
    """A function that saves by itself: the example in Ray's documentation, with gradients of all workers."""
    import torch
    from ray import train
    from ray.train import Checkpoint

    from reprieve.ray import should_checkpoint

    worker = Worker(options)
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    start = 0
    checkpoint = train.get_checkpoint()
    if checkpoint:
        with checkpoint.as_directory() as folder:
            saved = torch.load(f"{folder}/state.pt")
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        start = saved["step"] + 1
    worker.log(started=start, pid=os.getpid())
    worker.reach("before the first step", start)
    for step in range(start, options.steps):
        loss = train_step(model, optimizer, worker, step)
        worker.log(step=step, loss=loss)
        is_last = step == options.steps - 1
        if is_last:
            worker.reach("last step", step)
        due = options.way == "should_checkpoint" and not options.plain and should_checkpoint()
        if due or step % options.every == options.every - 1 or is_last:
            with tempfile.TemporaryDirectory(prefix="reprieve-test-") as folder:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                torch.save(state, f"{folder}/state.pt")
                time.sleep(options.save_s)
                worker.reach("upload", step)
                train.report({"step": step}, checkpoint=Checkpoint.from_directory(folder))
        else:
            worker.reach("report", step)
            train.report({"step": step})
    worker.log(ended={name: value.tolist() for name, value in model.state_dict().items()})


def engine_saves(options: RayOptions) -> None:
    """A function with `reprieve.ray.Run`."""
    import torch
    from ray import train

    from reprieve.ray import Run

    worker = Worker(options)
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    run = Run(model=model, optimizer=optimizer, every=options.every)
    worker.log(started=run.steps, pid=os.getpid())
    worker.reach("before the first step", run.steps)
    for _ in run.epochs(steps=options.steps):
        for step in run.batches(range(options.steps)):
            loss = train_step(model, optimizer, worker, step)
            worker.log(step=step, loss=loss)
            if step == options.steps - 1:
                worker.reach("last step", step)
            worker.reach("report", step)
            train.report({"step": step})
            if step % options.every == options.every - 1:
                worker.reach("upload", step)
            run.step(loss=loss)
    worker.log(ended={name: value.tolist() for name, value in model.state_dict().items()})


def trainer_of(options: RayOptions) -> Any:
    """Build the trainer."""
    import ray.train
    from ray.train import FailureConfig, ScalingConfig
    from ray.train.torch import TorchTrainer
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

    failures: dict[str, Any] = {"max_failures": options.max_failures}
    if options.preemption_grace_s:
        failures["preemption_grace_s"] = options.preemption_grace_s
    common = {"name": options.name, "storage_path": options.folder, "failure_config": FailureConfig(**failures)}
    if options.plain:
        run_config = ray.train.RunConfig(**common)
    else:
        from reprieve.ray import JITCheckpointConfig, RunConfig

        jit = JITCheckpointConfig(enabled=True, kill_wait=options.kill_wait, grace=options.grace)
        run_config = RunConfig(**common, jit_checkpoint_config=jit)
    kind = TorchTrainer if options.backend == "torch" else DataParallelTrainer
    return kind(
        engine_saves if options.way == "run" else own_saves,
        train_loop_config=options,
        scaling_config=ScalingConfig(
            num_workers=options.workers, resources_per_worker={options.resource: 1} if options.resource else None
        ),
        run_config=run_config,
    )


def main() -> None:
    import ray

    options = RayOptions(**json.loads(sys.argv[1]))
    folder = Path(options.folder)
    (folder / "pid-driver").write_text(str(os.getpid()))
    ray.init(log_to_driver=True, logging_level="WARNING")
    (folder / "node-driver").write_text(ray.get_runtime_context().get_node_id())
    result = trainer_of(options).fit()
    (folder / "result").write_text(json.dumps({"checkpoint": result.checkpoint.path, "metrics": result.metrics}))


if __name__ == "__main__":
    main()
