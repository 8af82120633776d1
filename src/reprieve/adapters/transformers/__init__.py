"""Protects trainers of Hugging Face Transformers, TRL and PEFT: stop them at any moment, resume them exactly.

    trainer = reprieve.transformers.protect(Trainer(…))
    trainer.train()

Under `reprieve run` every `Trainer` is protected without this call (`all_trainers.py`).
"""

from __future__ import annotations

import functools
import signal
from typing import Any, TypeVar

import transformers.trainer

from reprieve.adapters.transformers import all_trainers
from reprieve.adapters.transformers.protection import protection_of
from reprieve.data.workers import signals as worker_signals
from reprieve.preemption.signals import signal_watch
from reprieve.preemption.stop_listener import signal_number

T = TypeVar("T")


def protect(trainer: T, **options: Any) -> T:
    """Make `trainer.train()` resume, save in the background and stop at any moment; return the trainer.

    The options are those of `reprieve.Run`: `every`, `keep`, `fresh`, `name`, `grace_period`, `kill_wait`, `signals`,
    `notices`, `exit_wait`, …; `checkpoints`, the folder, defaults to `TrainingArguments.output_dir`. Where no
    option is given, TrainingArguments decide (`save_steps`, `save_total_limit`, …).
    """
    protection = protection_of(trainer, options)
    # Here and not in train(): that may run in another thread, and scripts may use DataLoaders before it.
    signals = [signal_number(each) for each in options.get("signals", (signal.SIGTERM,))]
    signal_watch.install(signals)
    worker_signals.shield(signals)
    original = trainer.train  # type: ignore[attr-defined]
    protected = functools.wraps(original)(functools.partial(protection.train, original))
    trainer.train = protected  # type: ignore[attr-defined]
    return trainer


def protect_all() -> None:
    """Protect every trainer of this process from its next `train` on, as `reprieve run` does.

    Settings come from the environment and from TrainingArguments. A second call changes nothing.
    """
    all_trainers.protect_all(transformers.trainer)
