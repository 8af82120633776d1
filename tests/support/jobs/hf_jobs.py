"""Fine-tuning jobs with Hugging Face's trainers that tests stop and resume, and the same without Reprieve.

A job records into its folder: `losses-<rank>.jsonl` has a line for each micro-batch (a resumed job appends), and
`end-<rank>.json` has its log history, the best checkpoint and a hash of the weights.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from torch.distributed.tensor import DTensor
from transformers.trainer_callback import ExportableState

from reprieve.testing.rank_process import disk
from tests.support.hf_trainers import MAKERS

PRELOAD = ("tests.support.hf_preload",)
"""Imported once, in the process that all ranks are forked from."""
TIMES = ("runtime", "per_second", "preparation_time", "step_time")


@dataclass(frozen=True)
class HfJob:
    """A training job: what is trained, and how."""

    folder: str
    safe: bool = True
    trainer: str = "trainer"
    """One of `MAKERS`."""
    model: str = "gpt2"
    stream: bool = False
    shuffled: int | None = None
    """Shuffle the stream of `datasets` through a buffer, in so many shards."""
    masking: bool = True
    """Mask what is fetched, at random."""
    workers: int = 0
    sharded: str | None = None
    """Shard by FSDP2 over all ranks, and save this type of state dict."""
    zero: int | None = None
    """Use DeepSpeed, with this stage of ZeRO."""
    samples: int = 60
    arguments: tuple[tuple[str, Any], ...] = ()
    """For TrainingArguments."""
    options: tuple[tuple[str, Any], ...] = ()
    """For `protect`."""
    given: str | bool | None = None
    """What the script passes to `train`."""
    patience: int | None = None
    """Add an EarlyStoppingCallback with this patience."""
    swapping: bool = False
    """Use an optimizer that swaps its weights for evaluations."""
    scaling: bool = False
    """Scale the loss so far up that steps are skipped again and again (accelerate itself scales on GPUs only)."""
    raising: int | None = None
    """At this step a callback raises in `state()`."""
    trainings: int = 1
    """How often the script calls `train`."""
    callbacks: tuple[transformers.TrainerCallback, ...] = ()
    """Callbacks that the script adds."""

    def but(self, **arguments: Any) -> HfJob:
        return replace(self, arguments=(*self.arguments, *arguments.items()))

    @property
    def output(self) -> Path:
        return Path(self.folder) / "out"


def train(job: HfJob) -> None:
    """Run one attempt of the job. It resumes from the last checkpoint."""
    folder, rank = Path(job.folder), int(os.environ.get("RANK", "0"))
    folder.mkdir(parents=True, exist_ok=True)
    transformers.set_seed(3)
    trainer = make(job)
    with (folder / f"losses-{rank}.jsonl").open("a", buffering=1) as trainer.losses:
        if job.safe:
            from reprieve.transformers import protect

            protect(trainer, disk=disk(), notices="off", **dict(job.options))
        for _ in range(job.trainings):
            output = trainer.train(job.given, None, None)
    state = trainer.state
    found = {
        "weights": _hash(trainer.accelerator.unwrap_model(trainer.model), job),
        "steps": output.global_step,
        "loss": output.training_loss,
        "log": [_without_times(entry) for entry in state.log_history],
        "best": Path(state.best_model_checkpoint).name if state.best_model_checkpoint else None,
        "best_metric": state.best_metric,
        "epoch": state.epoch,
        "scale": trainer.accelerator.scaler.get_scale() if job.scaling else None,
    }
    (folder / f"end-{rank}.json").write_text(json.dumps(found))


def _hash(model: torch.nn.Module, job: HfJob) -> str:
    """Hash all weights, of all ranks."""
    weights = hashlib.sha256()
    with _gathered(model) if job.zero == 3 else contextlib.nullcontext():
        for name, tensor in sorted(model.state_dict().items()):
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            data = whole.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            weights.update(name.encode() + data)
    return weights.hexdigest()


def _gathered(model: torch.nn.Module) -> Any:
    import deepspeed

    return deepspeed.zero.GatheredParameters(list(model.parameters()))


def make(job: HfJob) -> Any:
    """Make the trainer as a script does."""
    torch.manual_seed(3)
    arguments = {
        "output_dir": str(job.output), "per_device_train_batch_size": 4, "num_train_epochs": 2, "logging_steps": 5,
        "eval_strategy": "epoch", "save_strategy": "epoch", "use_cpu": True, "report_to": [], "disable_tqdm": True,
        "dataloader_num_workers": job.workers, "learning_rate": 1e-3, "seed": 5,
        **({"max_steps": 20, "eval_strategy": "steps", "eval_steps": 7} if job.stream else {}),
        **({"fsdp": True, "fsdp_config": {"state_dict_type": job.sharded}} if job.sharded else {}),
        **({"deepspeed": deepspeed_config(job.zero)} if job.zero is not None else {}),
        **dict(job.arguments),
    }  # fmt: skip
    if job.sharded:
        shard_on_cpus()
    if job.zero is not None:
        begin_deepspeed()
    trainer = MAKERS[job.trainer](job, arguments)
    if job.scaling:
        trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=3)
    trainer.add_callback(Counting(job.raising))
    if job.sharded:
        trainer.add_callback(SeesShards())
    if job.patience is not None:
        trainer.add_callback(transformers.EarlyStoppingCallback(job.patience))
    for callback in job.callbacks:
        if hasattr(callback, "trainer"):
            callback.trainer = trainer
        trainer.add_callback(callback)
    return trainer


def begin_deepspeed() -> None:
    """Use the existing process group, and no operator of DeepSpeed's own: its all-reduce takes a minute to compile."""
    import deepspeed

    deepspeed.ops.__compatible_ops__ = defaultdict(bool)
    deepspeed.init_distributed("gloo")


def deepspeed_config(stage: int, **zero: Any) -> dict[str, Any]:
    """Return a configuration as scripts have it: TrainingArguments fill in what is "auto"."""
    automatic = (
        "train_micro_batch_size_per_gpu",
        "train_batch_size",
        "gradient_accumulation_steps",
        "gradient_clipping",
    )
    return {
        **dict.fromkeys(automatic, "auto"), "bf16": {"enabled": "auto"}, "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, **zero},
    }  # fmt: skip


class Counting(transformers.TrainerCallback, ExportableState):
    """A callback with a state of its own, which it logs."""

    def __init__(self, raising: int | None = None) -> None:
        self.steps = self.epochs = 0
        self._raising = raising

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.steps += 1

    def on_epoch_end(self, *args: Any, **kwargs: Any) -> None:
        self.epochs += 1

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        state.log_history[-1] |= {"counted": [self.steps, self.epochs]}

    def state(self) -> dict[str, Any]:
        if self.steps == self._raising:
            raise RuntimeError("the callback refuses")
        return {"args": {}, "attributes": {"steps": self.steps, "epochs": self.epochs}}


class Asking(transformers.TrainerCallback):
    """A user's callback that makes training DataLoaders of its own."""

    def __init__(self) -> None:
        self.trainer: Any = None

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.trainer.get_train_dataloader()

    on_step_end = on_epoch_begin = on_train_begin


class Listing(transformers.TrainerCallback):
    """A user's callback that records the trainer's callbacks during training."""

    def __init__(self, folder: str) -> None:
        self.trainer: Any = None
        self._notes = Path(folder) / "callbacks.json"

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self._notes.write_text(json.dumps([type(each).__name__ for each in self.trainer.callback_handler.callbacks]))


class SeesShards(transformers.TrainerCallback):
    """A callback that asserts sharding before the first step. Later, an evaluation may have left weights gathered."""

    def on_train_begin(self, *args: Any, model: Any = None, **kwargs: Any) -> None:
        assert all(isinstance(each, DTensor) for each in model.parameters()), "the model is not sharded"


def shard_on_cpus() -> None:
    """Make accelerate use FSDP on CPUs, where it would silently run DDP instead."""
    original = AcceleratorState.__init__

    def init(self: Any, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
        original(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None:
            self.fsdp_plugin = fsdp_plugin
        if "fsdp_plugin" in vars(self):
            self.distributed_type = DistributedType.FSDP  # each time: accelerate copies it from a state without it

    AcceleratorState.__init__ = init  # type: ignore[method-assign]


def seen(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Return what all ranks of a job have recorded, by file."""
    found: dict[str, Any] = {}
    for path in sorted(Path(folder).glob("losses-*.jsonl")):
        found[path.name] = [json.loads(line) for line in path.read_text().splitlines()]
    for path in sorted(Path(folder).glob("end-*.json")):
        found[path.name] = json.loads(path.read_text())
    return found


def _without_times(entry: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in entry.items() if not any(word in name for word in TIMES)}
