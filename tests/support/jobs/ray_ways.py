"""Training functions on Ray that few tests need: shards of FSDP2, and samples that are dealt to the workers there are.

They are ways of `ray_job.py`: `{"way": "shards"}`, `{"way": "samples"}`.
"""

from __future__ import annotations

import os
import tempfile
import time
from typing import Any

from tests.support.jobs.ray_job import RayOptions, Worker, batch

SAMPLES = 64


def sharded_saves(options: RayOptions) -> None:
    """A model of FSDP2, of which each worker saves its own shard. One on another node than the driver's is slow."""
    import torch
    from ray import train
    from ray.train import Checkpoint
    from torch.distributed.fsdp import fully_shard

    from reprieve.ray import should_checkpoint

    worker = Worker(options)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))
    fully_shard(model)
    shards: Any = {name: value.to_local() for name, value in model.state_dict().items()}
    start = 0
    if checkpoint := train.get_checkpoint():
        with checkpoint.as_directory() as folder:
            worker.log(restored=sorted(os.listdir(folder)))
            saved = torch.load(f"{folder}/shard-{worker.rank}.pt")
        for name, shard in saved["shards"].items():
            shards[name].copy_(shard)
        start = saved["step"] + 1
    worker.log(started=start, pid=os.getpid())
    for step in range(start, options.steps):
        loss = (model(batch(step, worker.rank)) ** 2).mean()
        worker.reach("forward", step)
        loss.backward()
        for parameter in model.parameters():
            with torch.no_grad():
                parameter.sub_(parameter.grad, alpha=0.01)
            parameter.grad = None
        worker.log(step=step, loss=loss.item())
        time.sleep(options.step_s)
        if should_checkpoint() or worker.is_last(step, start):
            with tempfile.TemporaryDirectory(prefix="reprieve-test-") as folder:
                time.sleep(0 if worker.is_on_first_node else options.save_s)
                torch.save({"shards": shards, "step": step}, f"{folder}/shard-{worker.rank}.pt")
                train.report({"step": step}, checkpoint=Checkpoint.from_directory(folder))
        else:
            train.report({"step": step})
        if worker.is_last(step, start):
            break


def dealt_samples(options: RayOptions) -> None:
    """Two passes over a dataset with as many workers as there are. Each worker writes down its samples."""
    import torch
    from torch import distributed
    from torch.utils.data import DataLoader, DistributedSampler

    from reprieve.ray import Run

    worker = Worker(options)
    sampler: Any = DistributedSampler(range(SAMPLES), seed=5)  # type: ignore[arg-type]
    loader = DataLoader(range(SAMPLES), 2, sampler=sampler)  # type: ignore[arg-type]
    run = Run(model=torch.nn.Linear(1, 1), every=None)
    worker.log(started=run.steps, workers=worker.world_size)
    for epoch in run.epochs(2):
        sampler.set_epoch(epoch)
        for samples in run.batches(loader):
            worker.reach("forward", run.steps)
            distributed.all_reduce(torch.ones(1))
            run.step()
            worker.log(epoch=epoch, samples=samples.tolist())
