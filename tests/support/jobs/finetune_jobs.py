"""Fine-tuning jobs of `reprieve.finetune` that tests stop and start again, and the same with TRL alone."""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime, tzinfo
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers
import trl
from examples.finetune import make_tiny
from transformers.utils import chat_template_utils

from reprieve.finetune import job_record, main, merge
from reprieve.finetune.data import convert, read_rows
from reprieve.finetune.model import load_tokenizer
from reprieve.finetune.options import resolve
from reprieve.ranks.failpoints import reached

RATE = "2e-2"
"""High enough for the adapter to change what the model says within a few steps."""


@dataclass(frozen=True)
class FinetuneJob:
    """One fine-tuning job."""

    folder: str
    model: str
    data: str
    options: tuple[tuple[str, str], ...] = ()

    def but(self, **options: object) -> FinetuneJob:
        return replace(self, options=(*self.options, *((name, str(value)) for name, value in options.items())))

    @property
    def output(self) -> Path:
        return Path(self.folder) / "out"

    @property
    def words(self) -> list[str]:
        given = {
            "model_name": self.model, "dataset_path": self.data, "output_dir": str(self.output), "batch_size": "2",
            "learning_rate": RATE, "lora_rank": "4", "seed": "5", **dict(self.options),
        }  # fmt: skip
        return [word for name, value in given.items() for word in (f"--{name}", value)]

    def summary(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.output / "summary.json").read_text())
        return found

    def adapter(self) -> bytes:
        return (self.output / "adapter_model.safetensors").read_bytes()


def make_inputs(folder: str) -> None:
    make_tiny.make_all(Path(folder))


def save_without_rows(folder: str) -> None:
    """Write `saved` and `data.parquet` with columns, and nothing in them."""
    rows = datasets.Dataset.from_dict({"prompt": [], "completion": []})
    rows.save_to_disk(f"{folder}/saved")
    rows.to_pandas().to_parquet(f"{folder}/data.parquet")


def finetune(job: FinetuneJob) -> None:
    """Run one start of the job."""
    _prepare(job)
    if code := main(job.words):
        sys.exit(code)


def finetune_from_hub(job: FinetuneJob, url: str, cache: str) -> None:
    """Run one start of the job with another hub: the real one's address was read when this process began."""
    from huggingface_hub import constants

    constants.ENDPOINT, constants.HF_HUB_CACHE, constants.HF_HUB_OFFLINE = url, cache, False
    constants.HUGGINGFACE_CO_URL_TEMPLATE = url + "/{repo_id}/resolve/{revision}/{filename}"
    finetune(job)


def finetune_on_day(job: FinetuneJob, day: str) -> None:
    """Run one start of the job on this day."""

    class Day(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Day:
            return cls.fromisoformat(day)

    for module in (job_record, chat_template_utils):
        module.datetime = Day  # type: ignore[attr-defined]
    finetune(job)


def finetune_noting_flushes(job: FinetuneJob, note: str) -> None:
    """Run one start of the job, and note the files that it flushes, in order."""
    flushed, fsync, fdatasync = [], os.fsync, os.fdatasync

    def noting(flush: Callable[[int], None]) -> Callable[[int], None]:
        def flushing(fd: int) -> None:
            flushed.append(os.readlink(f"/proc/self/fd/{fd}"))
            flush(fd)

        return flushing

    os.fsync, os.fdatasync = noting(fsync), noting(fdatasync)  # type: ignore[assignment]
    finetune(job)
    Path(note).write_text(json.dumps(flushed))


def converted(job: FinetuneJob, note: str) -> None:
    """Write the rows of the job's data as TRL gets them, and what the chat template makes of their turns."""
    _prepare(job)
    options = resolve({"model_name": job.model, "dataset_path": job.data, **dict(job.options)}, {})
    rows = read_rows(Path(job.data), options)
    tokenizer, _ = load_tokenizer(Path(job.model), options, chat=rows.have_turns, date="2026-11-19")
    train, _ = convert(rows, tokenizer, options, marks_answers=True)
    texts = []
    for row in train:
        tools = json.loads(row["tools"]) if row.get("tools") else None
        texts.append(tokenizer.apply_chat_template(row["messages"], tools=tools, tokenize=False))
    Path(note).write_text(json.dumps({"rows": list(train), "texts": texts}))


def plain(job: FinetuneJob) -> None:
    """Train the same with TRL alone, as a script would."""
    import peft

    _prepare(job)
    options = dict(job.options)
    model = transformers.AutoModelForCausalLM.from_pretrained(job.model, dtype=torch.float32)
    trainer = trl.SFTTrainer(
        model=model,
        args=trl.SFTConfig(
            output_dir=str(job.output), per_device_train_batch_size=2, learning_rate=float(RATE), seed=5, bf16=False,
            max_steps=int(options["steps"]), gradient_checkpointing=False, report_to="none", use_cpu=True,
            save_strategy="no", max_length=1024,
        ),
        train_dataset=datasets.load_dataset("csv", data_files=job.data, split="train"),
        processing_class=transformers.AutoTokenizer.from_pretrained(job.model),
        peft_config=peft.LoraConfig(
            task_type="CAUSAL_LM", r=4, lora_alpha=8, lora_dropout=0.05, target_modules="all-linear"
        ),
    )  # fmt: skip
    trainer.train()
    trainer.save_model(str(job.output))


def _prepare(job: FinetuneJob) -> None:
    """Make trainers pass failpoints, and keep what `datasets` writes in the job's folder."""
    datasets.config.HF_DATASETS_CACHE = Path(job.folder) / "cache"
    for method, point in (("training_step", "forward"), ("prediction_step", "prediction")):
        setattr(trl.SFTTrainer, method, _passing(getattr(trl.SFTTrainer, method), point))
    merge.merge = _passing(merge.merge, "merge")


def _passing(method: Callable[..., Any], point: str) -> Callable[..., Any]:
    @functools.wraps(method)
    def passing(*args: Any, **kwargs: Any) -> Any:
        reached(point)
        return method(*args, **kwargs)

    return passing


def generate(job: FinetuneJob, note: str) -> None:
    """Write what `final/`, the model with its adapter, and the model alone generate."""
    import peft

    load = transformers.AutoModelForCausalLM.from_pretrained
    base = load(job.model, dtype=torch.float32)
    found = {
        "final": _generated(load(job.output / "final", dtype=torch.float32), job.output / "final"),
        "base": _generated(base, job.output),
        "adapted": _generated(peft.PeftModel.from_pretrained(base, job.output), job.output),
    }
    Path(note).write_text(json.dumps(found))


def _generated(model: Any, tokenizer: Path) -> list[list[int]]:
    vocabulary = transformers.AutoTokenizer.from_pretrained(tokenizer)
    prompts = [sample["prompt"] for sample in make_tiny.sums("completions", 6, seed=3)]
    found = []
    for prompt in prompts:
        with torch.no_grad():
            given = vocabulary(prompt, return_tensors="pt")
            found.append(model.eval().generate(**given, max_new_tokens=12, do_sample=False)[0].tolist())
    return found
