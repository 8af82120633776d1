"""What the launcher's hook does when a process imports `transformers.trainer`: every trainer is protected.

Nothing here may import the rest of this package at import time: a script that imports `reprieve.transformers` first
imports `transformers.trainer` through it, and the hook is called while that import is still under way.
"""

from __future__ import annotations

import functools
import os
import signal
from types import ModuleType
from typing import Any

from reprieve.adapters.transformers.patching import given
from reprieve.data.workers import signals as worker_signals
from reprieve.preemption.signals import signal_watch
from reprieve.progress.report import PROTECTED, report_process
from reprieve.storage.uri import DRILL, for_run


def protect_all(module: ModuleType) -> None:
    """Every trainer of this process, from its first `train` on. `module`: `transformers.trainer`."""
    signal_watch.install([signal.SIGTERM])
    worker_signals.shield([signal.SIGTERM])
    report_process(PROTECTED)
    real = module.Trainer.train

    @functools.wraps(real)
    def train(self: Any, *args: Any, **kwargs: Any) -> Any:
        from reprieve.adapters.transformers.protection import protection_of

        return protection_of(self, {}).train(functools.partial(real, self), *args, **kwargs)

    module.Trainer.train = train
    if os.environ.get(DRILL):
        redirect_output(module)


def redirect_output(module: ModuleType) -> None:
    """In a drill: give every trainer an output folder in the drill's scratch folder.

    A trainer makes its folder when it is constructed, TRL writes a model card into it with every save, and callbacks
    write their logs there. All of that is gone after the drill, and the job's own folder is as it was.
    """
    real = module.Trainer.__init__

    @functools.wraps(real)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        options = given(real, (self, *args), kwargs)
        if options.get("args") is None:
            options["args"] = module.TrainingArguments(output_dir="tmp_trainer")  # the trainer's own default
        arguments = options["args"]
        arguments.output_dir = os.fspath(for_run(arguments.output_dir))
        arguments.push_to_hub = False
        real(**options)

    module.Trainer.__init__ = init
