"""A run on Ray, and what stops it: the driver of the tests of `reprieve.ray`. The argument is `RayOptions` as JSON.

Each worker writes a line for every step to a file. Rank 0 carries out the disruptions of the plan, one after the other,
exactly at the moment that they name: `{"at": "forward", "step": 7, "target": "rank 1"}`. Each happens once in a run.
"""

from __future__ import annotations

import inspect
import json
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field, replace
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
    """Who saves: `should_checkpoint`, `run` (reprieve.ray.Run), `document` (periodic reports only), or one of
    ray_ways.py."""
    workers: int = 2
    """How many at least."""
    max_workers: int | None = None
    """Of an elastic run."""
    steps: int = 12
    step_s: float = 0.0
    steps_after: int | None = None
    """The run ends so many steps after its first restart."""
    every: int = 5
    kill_wait: float = 0.0
    grace: float | None = None
    plan: list[dict[str, Any]] = field(default_factory=list)
    backend: str = "torch"
    max_failures: int = 0
    preemption_grace_s: float = 0.0
    relax_collectives: bool = False
    save_s: float = 0.0
    """How long a save takes at least."""
    stop_save_s: float = 0.0
    """How much longer a save at a stop takes."""
    fail_stop_report: bool = False
    """The first report at a stop fails on rank 0: its checkpoint is not there."""
    async_upload_s: float | None = None
    """Checkpoints are uploaded in the background, and this takes so long."""
    fit_before: bool = False
    """The driver has trained another run before, with the same protection."""
    temporary: str | None = None
    """The folder for temporary folders."""
    loader_workers: int = 0
    """The processes of a DataLoader, which the function reads one sample from in each step."""
    kill_in_snapshot: int | None = None
    """The controller is killed before its n-th change to the disk for Ray's snapshot, from its third report on."""
    resource: str | None = None
    """What each worker needs, instead of a CPU."""
    protection: str = "RunConfig"
    """What switches Reprieve on: our `RunConfig`, `protect`, or the `environment` of the driver."""
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
        node = ray.get_runtime_context().get_node_id()
        (self.folder / f"node-{self.rank}").write_text(node)
        self.is_on_first_node = node == (self.folder / "node-driver").read_text()
        # Each generation has a placement group of its own. The files of earlier ones stay.
        self.generation = ray.get_runtime_context().get_placement_group_id()
        (self.folder / f"pid-{self.generation}-{self.rank}").write_text(str(os.getpid()))

    def log(self, **line: Any) -> None:
        with (self.folder / f"log-{self.rank}").open("a") as file:
            file.write(json.dumps({"at": time.time(), **line}) + "\n")

    def is_last(self, step: int, start: int) -> bool:
        after = self.options.steps_after
        return step == self.options.steps - 1 or (after is not None and start > 0 and step == start + after - 1)

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
            self.wait_for_stop()
        else:
            os.kill(self.pid(int(target.removeprefix("rank "))), number)

    def wait_for_stop(self) -> None:
        """Ray notices a drain only some seconds later. That is the moment that the plan names."""
        from reprieve.adapters.ray import worker

        end = time.monotonic() + 90
        while worker._worker is not None and worker._worker.stop is None:
            assert time.monotonic() < end, "Ray has not noticed the drain"
            time.sleep(0.01)

    def other_node(self) -> str:
        """A node of the run that is not the driver's."""
        import ray

        own = (self.folder / "node-driver").read_text()
        nodes = {(self.folder / f"node-{rank}").read_text() for rank in range(self.world_size)} - {own}
        assert nodes, f"all workers are on the driver's node; nodes: {[node['NodeID'] for node in ray.nodes()]}"
        return sorted(nodes)[0]

    def pid(self, rank: int) -> int:
        path = self.folder / f"pid-{self.generation}-{rank}"
        while not (path.exists() and path.read_text()):
            time.sleep(0.01)
        return int(path.read_text())


def kill_in_snapshot(options: RayOptions) -> Any:
    """Return a callback that kills the controller in the middle of the write of its snapshot."""
    from reprieve.adapters.ray import internals, snapshot
    from tests.support.jobs.kill_worker import Killing

    class KillInSnapshot(internals.ControllerCallback, internals.ReportCallback):  # type: ignore[misc]
        reports = 0

        def after_report(self, training_report: Any, metrics: Any) -> None:
            self.reports += 1
            if self.reports == 3:
                report = os.open(f"{options.folder}/killed", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
                disk = Killing(int(options.kill_in_snapshot or 0), None, report)
                snapshot.Disk = lambda: disk  # type: ignore[assignment, misc]

    return KillInSnapshot()


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
    from torch.utils.data import DataLoader

    from reprieve.ray import should_checkpoint

    worker = Worker(options)
    if options.temporary is not None:
        Path(options.temporary).mkdir(exist_ok=True)
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
    loader = iter(DataLoader(range(options.steps), num_workers=options.loader_workers))  # type: ignore[arg-type]
    children = [child.pid for child in multiprocessing.active_children()]
    worker.log(started=start, pid=os.getpid(), children=children)
    worker.reach("before the first step", start)
    for step in range(start, options.steps):
        next(loader)
        loss = train_step(model, optimizer, worker, step)
        worker.log(step=step, loss=loss)
        is_last = worker.is_last(step, start)
        if is_last:
            worker.reach("last step", step)
        due = options.way == "should_checkpoint" and not options.plain and should_checkpoint()
        if due or step % options.every == options.every - 1 or is_last:
            with tempfile.TemporaryDirectory(prefix="reprieve-test-", dir=options.temporary) as folder:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                torch.save(state, f"{folder}/state.pt")
                time.sleep(options.save_s + options.stop_save_s * due)
                worker.reach("upload", step)
                is_bad = due and options.fail_stop_report and worker.rank == 0 and start == 0
                saved_in = f"{folder}/missing" if is_bad else folder
                upload: dict[str, Any] = {}
                if options.async_upload_s is not None:
                    saved_in = shutil.copytree(folder, tempfile.mkdtemp(prefix="reprieve-test-"), dirs_exist_ok=True)
                    upload = slow_upload(options.async_upload_s)
                train.report({"step": step}, checkpoint=Checkpoint.from_directory(saved_in), **upload)
        else:
            worker.reach("report", step)
            train.report({"step": step})
        if is_last:
            break
    worker.log(ended={name: value.tolist() for name, value in model.state_dict().items()})


def slow_upload(seconds: float) -> dict[str, Any]:
    """Options of a report whose checkpoint is uploaded in the background."""
    from ray import train
    from ray.train import Checkpoint, CheckpointUploadMode

    def copy(checkpoint: Any, name: str) -> Any:
        time.sleep(seconds)
        target = Path(train.get_context().get_storage().experiment_fs_path, name)
        shutil.copytree(checkpoint.path, target, dirs_exist_ok=True)
        return Checkpoint.from_directory(target)

    return {
        "checkpoint_upload_mode": CheckpointUploadMode.ASYNC,
        "checkpoint_upload_fn": copy,
        "delete_local_checkpoint_after_upload": True,
    }


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


def function_of(way: str) -> Any:
    from tests.support.jobs import ray_ways

    ways = {"run": engine_saves, "shards": ray_ways.sharded_saves, "samples": ray_ways.dealt_samples}
    return ways.get(way, own_saves)


def trainer_of(options: RayOptions) -> Any:
    """Build the trainer."""
    import ray.train
    from ray.train import FailureConfig, ScalingConfig
    from ray.train.torch import TorchTrainer
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

    failures = {
        "max_failures": options.max_failures,
        "preemption_grace_s": options.preemption_grace_s or None,
        "relax_collectives_on_preemption": options.relax_collectives or None,
    }
    known = inspect.signature(FailureConfig).parameters  # the last two: Ray 2.60
    failures = {name: value for name, value in failures.items() if name in known and value is not None}
    common = {"name": options.name, "storage_path": options.folder, "failure_config": FailureConfig(**failures)}
    jit: Any = None
    if options.plain or options.protection == "environment":
        run_config = ray.train.RunConfig(**common)
    else:
        from reprieve.ray import JITCheckpointConfig, RunConfig, protect

        jit = JITCheckpointConfig(enabled=True, kill_wait=options.kill_wait, grace=options.grace)
        by_config = options.protection == "RunConfig"
        run_config = RunConfig(**common, jit_checkpoint_config=jit) if by_config else ray.train.RunConfig(**common)
    if options.kill_in_snapshot is not None:
        run_config.callbacks = [*run_config.callbacks, kill_in_snapshot(options)]
    kind = TorchTrainer if options.backend == "torch" else DataParallelTrainer
    num_workers = options.workers if options.max_workers is None else (options.workers, options.max_workers)
    trainer = kind(
        function_of(options.way),
        train_loop_config=options,
        scaling_config=ScalingConfig(
            # A node that the test has added gets workers, although they would fit on the first one.
            placement_strategy="SPREAD" if options.resource else "PACK",
            num_workers=num_workers,
            resources_per_worker={options.resource: 1} if options.resource else None,
        ),
        run_config=run_config,
    )
    return protect(trainer, jit) if options.protection == "protect" and not options.plain else trainer


def main() -> None:
    import ray

    options = RayOptions(**json.loads(sys.argv[1]))
    folder = Path(options.folder)
    (folder / "pid-driver").write_text(str(os.getpid()))
    ray.init(log_to_driver=True, logging_level="WARNING")
    (folder / "node-driver").write_text(ray.get_runtime_context().get_node_id())
    if options.fit_before:
        (folder / "before").mkdir()
        shutil.copy(folder / "node-driver", folder / "before")
        trainer_of(replace(options, folder=str(folder / "before"), steps=1, plan=[])).fit()
    result = trainer_of(options).fit()
    (folder / "result").write_text(json.dumps({"checkpoint": result.checkpoint.path, "metrics": result.metrics}))


if __name__ == "__main__":
    main()
