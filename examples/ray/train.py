"""A training function on Ray Train that saves where `should_checkpoint()` is true. Stop it at any moment.

pip install '.[ray]'
python examples/ray/train.py                        2 workers, on the CPU
ps aux | grep ray::RayTrainWorker                   kill -TERM one of them: all save, restart and resume
kill -TERM <the driver's process id>                saves and exits with 143; the next start resumes
"""

import tempfile
from pathlib import Path
from typing import Any

import torch
from ray import train
from ray.train import Checkpoint, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model
from torch import nn

from reprieve.ray import JITCheckpointConfig, RunConfig, should_checkpoint


def make_batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The data of one step: the same after a resume."""
    generator = torch.Generator().manual_seed(1_000_000 * rank + step)
    return torch.randn(32, 16, generator=generator), torch.randint(0, 10, (32,), generator=generator)


def train_func(config: dict[str, Any]) -> None:
    rank = train.get_context().get_world_rank()
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 10))
    model = prepare_model(network)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    start = 0
    if checkpoint := train.get_checkpoint():
        with checkpoint.as_directory() as folder:
            state = torch.load(Path(folder) / "state.pt", weights_only=True)
        network.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        start = state["step"] + 1

    for step in range(start, config["steps"]):
        inputs, labels = make_batch(step, rank)
        loss = nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

        metrics = {"step": step, "loss": loss.item()}
        # On every worker, in every step: it is true on all of them in the same step.
        if should_checkpoint() or step % 100 == 99:
            with tempfile.TemporaryDirectory() as folder:
                checkpoint = None
                if rank == 0:
                    state = {"model": network.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                    torch.save(state, Path(folder) / "state.pt")
                    checkpoint = Checkpoint.from_directory(folder)
                train.report(metrics, checkpoint=checkpoint)
        elif step % 20 == 0:  # a report waits for Ray's next poll, 0.1 s
            train.report(metrics)


if __name__ == "__main__":
    trainer = TorchTrainer(
        train_func,
        train_loop_config={"steps": 2000},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            name="should-checkpoint",
            storage_path=str(Path("ray-results").absolute()),
            jit_checkpoint_config=JITCheckpointConfig(enabled=True),
        ),
    )
    print(trainer.fit().checkpoint)
