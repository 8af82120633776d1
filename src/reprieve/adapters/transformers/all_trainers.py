"""Protects every trainer of a process: the launcher's import hook calls `protect_all` for `transformers.trainer`.

Nothing here may import the rest of this package at import time: a script that imports `reprieve.transformers` first
imports `transformers.trainer` through it, and the hook runs while that import is still in progress.
"""

from __future__ import annotations

import functools
import os
import signal
from types import ModuleType
from typing import Any

from reprieve.adapters.transformers.patching import call_arguments
from reprieve.data.workers import signals as worker_signals
from reprieve.launcher_protocol import DRILL, Protected, send_once
from reprieve.preemption.signals import signal_watch
from reprieve.storage.uri import run_folder


def protect_all(module: ModuleType) -> None:
    """Protect every trainer of this process from its first `train` on. `module`: `transformers.trainer`."""
    signal_watch.install([signal.SIGTERM])
    worker_signals.shield([signal.SIGTERM])
    send_once(Protected())
    original = module.Trainer.train

    @functools.wraps(original)
    def train(self: Any, *args: Any, **kwargs: Any) -> Any:
        from reprieve.adapters.transformers.protection import protection_of

        return protection_of(self, {}).train(functools.partial(original, self), *args, **kwargs)

    module.Trainer.train = train
    if os.environ.get(DRILL):
        redirect_output(module)


def redirect_output(module: ModuleType) -> None:
    """In a drill, give every trainer an output folder inside the drill's scratch folder.

    A trainer makes its folder in its constructor, TRL writes a model card into it with every save, and callbacks write
    their logs there. The drill removes all of that, and the job's own folder stays as it was.
    """
    original = module.Trainer.__init__

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        options = call_arguments(original, (self, *args), kwargs)
        if options.get("args") is None:
            options["args"] = module.TrainingArguments(output_dir="tmp_trainer")  # the trainer's own default
        arguments = options["args"]
        arguments.output_dir = os.fspath(run_folder(arguments.output_dir, os.environ[DRILL]))
        arguments.push_to_hub = False
        original(**options)

    module.Trainer.__init__ = init
