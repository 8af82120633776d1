"""`train.py` with `reprieve.ray.Run`, which saves in the background and resumes bit for bit, data position included.

pip install '.[ray]'
python examples/ray/run.py                          2 workers, on the CPU
ps aux | grep ray::RayTrainWorker                   kill -TERM one of them: all save, restart and resume
kill -TERM <the driver's process id>                saves and exits with 143; the next start resumes
"""

from pathlib import Path
from typing import Any

import torch
from ray import train
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from reprieve.ray import JITCheckpointConfig, Run, RunConfig


def train_func(config: dict[str, Any]) -> None:
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(4096, 16), torch.randint(0, 10, (4096,)))
    sampler: DistributedSampler[Any] = DistributedSampler(data)
    loader = DataLoader(data, 32, sampler=sampler)
    model = prepare_model(nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 10)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    run = Run(model=model, optimizer=optimizer, every="5m")
    for epoch in run.epochs(config["epochs"]):
        sampler.set_epoch(epoch)
        for inputs, labels in run.batches(loader):
            loss = nn.functional.cross_entropy(model(inputs), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.step(loss=loss)
        train.report({"epoch": epoch, "steps": run.steps})


if __name__ == "__main__":
    trainer = TorchTrainer(
        train_func,
        train_loop_config={"epochs": 30},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            name="run",
            storage_path=str(Path("ray-results").absolute()),
            jit_checkpoint_config=JITCheckpointConfig(enabled=True),
        ),
    )
    print(trainer.fit().checkpoint)
