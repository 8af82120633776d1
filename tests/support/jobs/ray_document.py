"""The example of the proposal for Ray's own JIT checkpoints, as people would type it: the imports are the proposal's.

It needs `reprieve run`, under which they resolve. Arguments: FOLDER EPOCHS AFTER [LINE]: it trains so many epochs, or
AFTER once it was restarted. LINE: with the one line that makes it save at a stop.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path

import torch
from ray import train
from ray.train import Checkpoint, RunConfig, ScalingConfig
from ray.train._internal.jit_checkpoint_config import JITCheckpointConfig
from ray.train.torch import TorchTrainer


def train_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> float:
    loss = (model(torch.ones(4, 10)) ** 2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.1)
    return float(loss.item())


def train_func(config: dict[str, object]) -> None:
    if config["line"]:
        from reprieve.ray import should_checkpoint
    else:

        def should_checkpoint() -> bool:
            return False

    model = torch.nn.Linear(10, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    checkpoint = train.get_checkpoint()
    start_epoch = 0
    if checkpoint:
        with checkpoint.as_directory() as checkpoint_dir:
            model.load_state_dict(torch.load(f"{checkpoint_dir}/model.pt"))
            start_epoch = torch.load(f"{checkpoint_dir}/epoch.pt") + 1
    rank = train.get_context().get_world_rank()
    with Path(str(config["folder"]), f"epochs-{rank}").open("a") as log:
        print("start", start_epoch, os.getpid(), file=log, flush=True)
        epochs = start_epoch + int(str(config["after"])) if checkpoint else int(str(config["epochs"]))
        for epoch in range(start_epoch, epochs):
            loss = train_step(model, optimizer)
            print(epoch, file=log, flush=True)
            if should_checkpoint() or epoch % 10 == 0:
                with tempfile.TemporaryDirectory() as tmpdir:
                    torch.save(model.state_dict(), f"{tmpdir}/model.pt")
                    torch.save(epoch, f"{tmpdir}/epoch.pt")
                    checkpoint = Checkpoint.from_directory(tmpdir)
                    train.report({"epoch": epoch, "loss": loss}, checkpoint=checkpoint)
            else:
                train.report({"epoch": epoch, "loss": loss})


if __name__ == "__main__":
    folder, epochs, after, *line = sys.argv[1:]
    trainer = TorchTrainer(
        train_func,
        train_loop_config={"epochs": epochs, "after": after, "folder": folder, "line": bool(line)},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            name="document", storage_path=folder, jit_checkpoint_config=JITCheckpointConfig(enabled=True)
        ),
    )
    result = trainer.fit()
    Path(folder, "result").write_text(str(result.metrics))
