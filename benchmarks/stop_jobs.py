"""The trainings to stop: `python -m benchmarks.stop_jobs NAME JSON`, or a function that ranks run.

tiny             next to no state, steps of known length: how soon the save begins
ours             a state of a given size under `reprieve.Run`: how soon it is durable
transformers     the same under transformers' Trainer with its own JIT checkpoint; flushed, which it does not do itself
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import reprieve
from benchmarks.stop_process import BEGUN, DURABLE, Notes

STEP_S = 0.02
"""The length of a step that sleeps. Longer ones would hide the measured times."""
SEQUENCE = 1024
SEQUENCES = 4
"""A step of about 100 ms on an H200."""


class Tokens(Dataset[Tensor]):
    """More batches than a training reads before it is stopped."""

    def __init__(self, vocab: int, length: int) -> None:
        self._vocab, self._length = vocab, length

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> Tensor:
        return torch.arange(index, index + self._length) % self._vocab


def tiny(folder: Path) -> None:
    """Run one of several ranks. They wait for each other in every step, as under DDP."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rank, together = int(os.environ["RANK"]), dist.is_initialized()
    model = nn.Linear(8, 8)
    notes = Notes(folder, rank)
    loader = DataLoader(Tokens(64, 8), 4)
    run = reprieve.Run(folder / "checkpoints", notices="off", model=model)
    with notes.kept():
        for _ in run.batches(loader):
            with notes.step():
                time.sleep(STEP_S)
                if together:
                    dist.all_reduce(torch.ones(1))
            run.step()


def ours(folder: Path, shape: dict[str, int], device: str = "cpu") -> None:
    from benchmarks.state import Shape, TrainingState

    on_gpu = device == "cuda"
    state = TrainingState(Shape(**shape), device)
    notes = Notes(folder)
    loader = DataLoader(
        Tokens(state.shape.vocab, SEQUENCE if on_gpu else 16), SEQUENCES if on_gpu else 1, pin_memory=on_gpu
    )
    run = reprieve.Run(folder / "checkpoints", notices="off", **state.parts())
    with notes.kept(bytes=state.bytes):
        for tokens in run.batches(loader):
            with notes.step():
                if on_gpu:
                    state.train_step(tokens.to(device, non_blocking=True))
                    torch.cuda.synchronize()  # as a loop does that reads its loss
                else:
                    time.sleep(STEP_S)
            run.step()


def transformers(folder: Path, shape: dict[str, int]) -> None:
    from transformers import Qwen2Config, Qwen2ForCausalLM, Trainer, TrainingArguments

    from benchmarks.peers import flush

    notes = Notes(folder)

    class Sleeping(Trainer):  # type: ignore[misc, unused-ignore]
        def training_step(self, *args: Any, **options: Any) -> Tensor:
            if not self.state.global_step:  # a real one: the optimizer has its state then
                first: Tensor = super().training_step(*args, **options)
                return first
            with notes.step():
                time.sleep(STEP_S)
            return torch.zeros(())

    config = Qwen2Config(
        hidden_size=shape["hidden"],
        num_hidden_layers=shape["layers"],
        num_attention_heads=shape["heads"],
        num_key_value_heads=shape["kv_heads"],
        intermediate_size=shape["intermediate"],
        vocab_size=shape["vocab"],
        tie_word_embeddings=True,
    )
    arguments = TrainingArguments(
        output_dir=str(folder),
        enable_jit_checkpoint=True,
        save_strategy="no",
        max_steps=100_000,
        report_to=[],
        per_device_train_batch_size=1,
        max_grad_norm=0,
        use_cpu=True,
        disable_tqdm=True,
        logging_strategy="no",
    )
    tokens = Tokens(config.vocab_size, 16)
    trainer = Sleeping(
        model=Qwen2ForCausalLM(config),
        args=arguments,
        train_dataset=tokens,
        data_collator=lambda batch: {"input_ids": torch.stack(batch), "labels": torch.stack(batch)},
    )
    (manager,) = [
        callback.jit_manager for callback in trainer.callback_handler.callbacks if hasattr(callback, "jit_manager")
    ]
    stock = manager.execute_jit_checkpoint
    written = 0

    def timed() -> None:
        nonlocal written
        notes.at(BEGUN)
        stock()
        (checkpoint,) = folder.glob("checkpoint-*")
        if (checkpoint / "checkpoint-is-incomplete.txt").exists():
            raise RuntimeError("the checkpoint is incomplete")
        flush(checkpoint)
        notes.at(DURABLE)
        written = sum(file.stat().st_size for file in checkpoint.iterdir())

    manager.execute_jit_checkpoint = timed
    trainer.train()
    notes.write(bytes=written)


JOBS = {"ours": ours, "transformers": transformers}

if __name__ == "__main__":
    name, given = sys.argv[1], json.loads(sys.argv[2])
    JOBS[name](Path(given.pop("folder")), **given)
