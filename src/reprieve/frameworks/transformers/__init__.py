"""Hugging Face Transformers, TRL, PEFT: a trainer that can be stopped.

    trainer = reprieve.transformers.protect(Trainer(…))
    trainer.train()

Under `reprieve run` every `Trainer` is protected, and nobody has to say so.
"""

from __future__ import annotations

import functools
import signal
from types import ModuleType
from typing import Any, TypeVar

from reprieve.frameworks.transformers.protection import Protection
from reprieve.preemption.guard import signal_number
from reprieve.preemption.signals import watch

T = TypeVar("T")

_PROTECTION = "_reprieve_protection"


def protect(trainer: T, **options: Any) -> T:
    """From now on `trainer.train()` resumes, saves in the background, and can be stopped at any moment.

    The options are those of `reprieve.Run`: `every`, `keep`, `fresh`, `name`, `grace`, `kill_wait`, `signals`,
    `notices`, `exit_wait`, …; `checkpoints` is the folder, `TrainingArguments.output_dir` if it is not given. What
    TrainingArguments say (`save_steps`, `save_total_limit`, …) holds where nothing else is said.
    """
    protection = _protection(trainer, options)
    watch.ready([signal_number(one) for one in options.get("signals", (signal.SIGTERM,))])  # train() may be in a thread
    real = trainer.train  # type: ignore[attr-defined]
    trainer.train = functools.wraps(real)(functools.partial(protection.train, real))  # type: ignore[attr-defined]
    return trainer


def protect_all(module: ModuleType) -> None:
    """Every trainer of this process, from its first `train` on. The launcher's hook calls this with
    `transformers.trainer`."""
    watch.ready([signal.SIGTERM])
    real = module.Trainer.train

    @functools.wraps(real)
    def train(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _protection(self, {}).train(functools.partial(real, self), *args, **kwargs)

    module.Trainer.train = train


def _protection(trainer: Any, options: dict[str, Any]) -> Protection:
    known: Protection | None = vars(trainer).get(_PROTECTION)
    if known is None:
        known = Protection(trainer, options)
        setattr(trainer, _PROTECTION, known)
    return known
