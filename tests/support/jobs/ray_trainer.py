"""A `transformers.Trainer` in two workers of Ray, as its documentation shows it. The argument is a folder.

`python -m tests.support.jobs.ray_trainer FOLDER STEPS [PLAIN]`, with PLAIN for a run without Reprieve. Rank 0 stops the
workers at the steps in FOLDER/plan, one after the other.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from ray import train
from ray.train import FailureConfig, ScalingConfig
from ray.train.torch import TorchTrainer


def train_func(config: dict[str, Any]) -> None:
    from ray.train.huggingface.transformers import RayTrainReportCallback, prepare_trainer
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

    rank, folder = train.get_context().get_world_rank(), Path(config["folder"])
    (folder / f"pid-{rank}").write_text(str(os.getpid()))
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=64, n_positions=16))
    tokens = torch.randint(0, 64, (64, 12), generator=torch.Generator().manual_seed(1))
    data = [{"input_ids": row, "labels": row} for row in tokens]

    class Disruptions(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            for step in json.loads((folder / "plan").read_text()):
                done = folder / f"done-{step}"
                if rank == 0 and state.global_step == step and not done.exists():
                    done.touch()
                    os.kill(int((folder / f"pid-{step % 2}").read_text()), signal.SIGTERM)

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            if rank == 0 and "loss" in logs:
                with (folder / "losses").open("a") as file:
                    print(json.dumps([state.global_step, logs["loss"]]), file=file)

    arguments = TrainingArguments(
        output_dir=str(folder / "model"),
        max_steps=config["steps"],
        per_device_train_batch_size=4,
        logging_steps=1,
        save_strategy="steps",
        save_steps=5,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        dataloader_num_workers=2,
    )
    trainer = Trainer(model, arguments, train_dataset=data, callbacks=[Disruptions()])
    trainer.add_callback(RayTrainReportCallback())
    prepare_trainer(trainer).train()
    if rank == 0:
        torch.save(trainer.accelerator.unwrap_model(trainer.model).state_dict(), folder / "model.pt")


def main() -> None:
    folder, steps, *plain = sys.argv[1:]
    common = {"name": "trainer", "storage_path": folder, "failure_config": FailureConfig(max_failures=0)}
    if plain:
        run_config = train.RunConfig(**common)
    else:
        from reprieve.ray import JITCheckpointConfig, RunConfig

        run_config = RunConfig(**common, jit_checkpoint_config=JITCheckpointConfig(enabled=True, kill_wait=0))
    TorchTrainer(
        train_func,
        train_loop_config={"folder": folder, "steps": int(steps)},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=run_config,
    ).fit()


if __name__ == "__main__":
    main()
