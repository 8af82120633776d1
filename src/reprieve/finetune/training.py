"""Trains the adapter with TRL's SFTTrainer, protected by the Transformers adapter of Reprieve."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from reprieve.errors import ConfigError, needing
from reprieve.finetune.columns import ALPACA, CHAT
from reprieve.finetune.data import Rows, check_lengths, convert, explaining_template_errors
from reprieve.finetune.environment import print_once
from reprieve.finetune.model import adapter_config, check_targets, load_model, load_tokenizer
from reprieve.finetune.options import AUTO, FinetuneOptions
from reprieve.settings import resolve

_LOGGED = 0.01
"""A log line for each hundredth of the training: points of a curve, and little in `trainer_state.json`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """What is left of a training when it is complete."""

    log: list[dict[str, Any]]
    """The log history over all attempts."""
    steps: int
    epochs: float


def make_trainer(options: FinetuneOptions, model_folder: Path, rows: Rows, output: Path, *, date: str) -> Any:
    """Return the trainer. Everything that can be wrong with the input is found here. `date`: when the job began."""
    with needing("reprieve finetune"):
        trl: Any = import_module("trl")  # it exports lazily, which mypy cannot follow
    import torch
    import transformers

    bf16 = options.bf16 if options.bf16 != AUTO else _prefers_bf16(options)
    _check_precision(options, bf16=bool(bf16))
    # Before anything is drawn, as TRL does: adding rows to embeddings draws them.
    transformers.set_seed(options.seed)
    tokenizer, learned = load_tokenizer(model_folder, options, chat=rows.have_turns, date=date)
    marks = rows.form.form == CHAT and _marks_answers(tokenizer)
    train, evaluation = convert(rows, tokenizer, options, marks_answers=marks)
    if (warning := check_lengths(train, tokenizer, options.max_length)) is not None:
        print_once(warning)
    dtype = torch.bfloat16 if bf16 else torch.float16 if options.fp16 else torch.float32
    model = load_model(model_folder, tokenizer, options, dtype)
    check_targets(model, options.lora_targets)
    print_once(_description(options, rows, train, tokenizer, marks=marks))
    arguments = trl.SFTConfig(
        output_dir=str(output),
        per_device_train_batch_size=options.batch_size,
        per_device_eval_batch_size=options.batch_size,
        gradient_accumulation_steps=options.accumulation,
        num_train_epochs=options.epochs,
        max_steps=options.steps or -1,
        learning_rate=options.learning_rate,
        seed=options.seed,
        bf16=bool(bf16),
        fp16=options.fp16,
        gradient_checkpointing=options.gradient_checkpointing,
        max_length=options.max_length,
        packing=options.packing,
        completion_only_loss=options.completion_only and "prompt" in train.column_names,
        assistant_only_loss=options.completion_only and marks,
        eval_strategy="epoch" if evaluation is not None else "no",
        save_strategy="no",  # Reprieve saves by time (CHECKPOINT_INTERVAL), and at the end
        logging_steps=_LOGGED,
        logging_first_step=True,
        disable_tqdm=not sys.stderr.isatty(),
        report_to="none",
        use_cpu=not torch.cuda.is_available(),
    )
    with explaining_template_errors(tokenizer, train, evaluation):
        trainer: Any = trl.SFTTrainer(
            model=model,
            args=arguments,
            train_dataset=train,
            eval_dataset=evaluation,
            processing_class=tokenizer,
            peft_config=adapter_config(model, options, learned),
        )
    if not len(trainer.train_dataset):
        raise ConfigError(
            f"nothing is left to learn of the samples within --max_length {options.max_length}: choose a higher limit"
        )
    if not options.packing and (dropped := len(train) - len(trainer.train_dataset)):
        limit = f"--max_length {options.max_length}"
        print_once(f"{dropped} of {len(train)} samples have no answer within {limit} and are left out")
    return trainer


def train(trainer: Any, output: Path) -> Trained:
    """Train, or resume, until the training is complete, and write the adapter. Raises Preempted at a stop."""
    from reprieve.adapters.transformers import protect

    settings = resolve({}, options=False)
    every = {"every": settings.every} if settings.sources["every"] == "default" else {}
    protect(trainer, **every)
    trainer.train()
    trainer.save_model(str(output))
    state = trainer.state
    return Trained(log=list(state.log_history), steps=int(state.global_step), epochs=float(state.epoch or 0))


def _prefers_bf16(options: FinetuneOptions) -> bool:
    import torch

    return not options.fp16 and torch.cuda.is_available() and torch.cuda.is_bf16_supported()


def _check_precision(options: FinetuneOptions, *, bf16: bool) -> None:
    import torch

    if options.fp16 and not torch.cuda.is_available():
        raise ConfigError("--fp16 needs a GPU, and there is none: leave it out")
    if bf16 and torch.cuda.is_available() and not torch.cuda.is_bf16_supported():
        raise ConfigError("--bf16: this GPU has no bfloat16. Use --fp16")


def _marks_answers(tokenizer: Any) -> bool:
    """Whether the chat template, or TRL's form of it for training, marks the assistant's part."""
    from trl.chat_template_utils import get_training_chat_template, has_generation_markers

    if has_generation_markers(tokenizer.chat_template):
        return True
    try:
        return get_training_chat_template(tokenizer) is not None
    except ValueError:  # a template that TRL does not know
        return False


def _description(options: FinetuneOptions, rows: Rows, train: Any, tokenizer: Any, *, marks: bool) -> str:
    if not options.completion_only:
        learned = "everything"
    elif rows.form.form == CHAT:
        learned = "all answers" if marks else "the last answer (the chat template does not mark answers)"
    else:
        learned = "the answers" if "prompt" in train.column_names else "everything"
    as_turns = " as turns of a conversation" if rows.form.form == ALPACA and tokenizer.chat_template else ""
    return f"{len(train)} samples of the form {rows.form}{as_turns}; the model learns {learned}"
