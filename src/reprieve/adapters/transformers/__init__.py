"""Hugging Face Transformers, TRL, PEFT: a trainer that can be stopped.

    trainer = reprieve.transformers.protect(Trainer(…))
    trainer.train()

Under `reprieve run` every `Trainer` is protected, and nobody has to say so.
"""

from __future__ import annotations

import functools
import signal
from typing import Any, TypeVar

from reprieve.adapters.transformers.protection import protection_of
from reprieve.data.workers import signals as worker_signals
from reprieve.preemption.signals import signal_watch
from reprieve.preemption.stop_listener import signal_number

T = TypeVar("T")


def protect(trainer: T, **options: Any) -> T:
    """From now on `trainer.train()` resumes, saves in the background, and can be stopped at any moment.

    The options are those of `reprieve.Run`: `every`, `keep`, `fresh`, `name`, `grace_period`, `kill_wait`, `signals`,
    `notices`, `exit_wait`, …; `checkpoints` is the folder, `TrainingArguments.output_dir` if it is not given. What
    TrainingArguments say (`save_steps`, `save_total_limit`, …) holds where nothing else is said.
    """
    protection = protection_of(trainer, options)
    # Before train(): that may be in a thread, and DataLoaders may be used before it.
    signals = [signal_number(one) for one in options.get("signals", (signal.SIGTERM,))]
    signal_watch.install(signals)
    worker_signals.shield(signals)
    real = trainer.train  # type: ignore[attr-defined]
    trainer.train = functools.wraps(real)(functools.partial(protection.train, real))  # type: ignore[attr-defined]
    return trainer
