"""An ordinary fine-tuning script that does not know Reprieve, for `hf_defects` and its tests.

python -m benchmarks.hf_script OUTPUT [--jit] [--workers 2] …
"""

from __future__ import annotations

import argparse
import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


class Tokens(Dataset[dict[str, torch.Tensor]]):
    """Generated tokens, masked at random, as augmentations are."""

    def __init__(self, count: int, seed: int) -> None:
        self._data = torch.randint(0, 97, (count, 16), generator=torch.Generator().manual_seed(seed))

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        sample = self._data[index]
        return {"input_ids": sample.masked_fill(torch.rand(16) < 0.1, 0), "labels": sample}


class Paced(Trainer):
    """Makes steps and evaluations take as long as those of a large model, and records them."""

    def __init__(self, options: argparse.Namespace, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._options = options
        rank = os.environ.get("RANK", "0")
        self._seen = (Path(options.output) / f"seen-{rank}.jsonl").open("a", buffering=1)

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss: torch.Tensor = super().training_step(*args, **kwargs)
        time.sleep(self._options.step_s)
        self._seen.write(json.dumps({"step": self.state.global_step + 1, "loss": loss.item()}) + "\n")
        return loss

    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        self._seen.write(json.dumps({"evaluating": self.state.global_step}) + "\n")
        time.sleep(self._options.prediction_s)
        return super().prediction_step(*args, **kwargs)

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        super().save_model(*args, **kwargs)
        time.sleep(self._options.save_s)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("output")
    parser.add_argument("--jit", action="store_true", help="transformers' own just-in-time checkpoints")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--step-s", type=float, default=0.0)
    parser.add_argument("--prediction-s", type=float, default=0.0)
    parser.add_argument("--save-s", type=float, default=0.0)
    parser.add_argument("--limit", type=int, help="save_total_limit")
    parser.add_argument("--best", action="store_true", help="load_best_model_at_end")
    parser.add_argument("--save-steps", type=int)
    parser.add_argument("--in-a-thread", action="store_true")
    options = parser.parse_args()
    if options.in_a_thread:
        thread = threading.Thread(target=train, args=(options,))
        thread.start()
        thread.join()
    else:
        train(options)


def train(options: argparse.Namespace) -> None:
    Path(options.output).mkdir(parents=True, exist_ok=True)
    transformers.set_seed(0)
    every = {"save_strategy": "steps", "save_steps": options.save_steps} if options.save_steps else {}
    trainer = Paced(
        options,
        model=GPT2LMHeadModel(GPT2Config(vocab_size=97, n_positions=16, n_embd=32, n_layer=2, n_head=2)),
        args=TrainingArguments(
            **{
                "output_dir": options.output,
                "per_device_train_batch_size": options.batch,
                "use_cpu": True,
                "num_train_epochs": options.epochs,
                "eval_strategy": "epoch",
                "save_strategy": "epoch",
                "logging_steps": 5,
                "report_to": [],
                "disable_tqdm": True,
                "save_total_limit": options.limit,
                "dataloader_num_workers": options.workers,
                "gradient_accumulation_steps": options.accumulate,
                "load_best_model_at_end": options.best,
                "enable_jit_checkpoint": options.jit,
                "learning_rate": 1e-3,
            }
            | every
        ),
        train_dataset=Tokens(80, 1),
        eval_dataset=Tokens(16, 2),
    )
    trainer.train(resume_from_checkpoint=True if options.resume else None)
    assert trainer.model is not None
    weights = torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()])
    if int(os.environ.get("RANK", "0")) == 0:
        done = {"steps": trainer.state.global_step, "weights": weights.double().sum().item()}
        (Path(options.output) / "after-train.json").write_text(json.dumps(done))


if __name__ == "__main__":
    main()
