"""Protects every trainer of a process, for the launcher's import hook and for `reprieve.transformers.protect_all`.

Nothing here may import the rest of this package at import time: a script that imports `reprieve.transformers` first
imports `transformers.trainer` through it, and the hook runs while that import is still in progress.
"""

from __future__ import annotations

import functools
import os
import signal
from types import ModuleType
from typing import Any

from reprieve.adapters.transformers.submitted import change_arguments, replace_arguments
from reprieve.data.workers import signals as worker_signals
from reprieve.launcher_protocol import DRILL, Protected, send_once
from reprieve.preemption.signals import signal_watch
from reprieve.storage.uri import run_folder
from reprieve.submitted_arguments import SubmittedArguments

_PROTECTED = "_reprieve_protects"


def protect_all(module: ModuleType) -> None:
    """Protect every trainer of this process from its next `train` on. `module`: `transformers.trainer`."""
    found = SubmittedArguments.from_environment()
    if found is not None and not found.protected:
        from reprieve.adapters.transformers.progress_only import report_all

        report_all(module)
        return
    signal_watch.install([signal.SIGTERM])
    worker_signals.shield([signal.SIGTERM])
    send_once(Protected())
    original = module.Trainer.train
    if hasattr(original, _PROTECTED):
        return

    @functools.wraps(original)
    def train(self: Any, *args: Any, **kwargs: Any) -> Any:
        from reprieve.adapters.transformers.protection import protection_of

        return protection_of(self, {}).train(functools.partial(original, self), *args, **kwargs)

    setattr(train, _PROTECTED, True)
    module.Trainer.train = train
    if os.environ.get(DRILL):
        redirect_output(module)
    if found is not None:
        change_arguments(module, functools.partial(replace_arguments, found))  # before the drill's change


def redirect_output(module: ModuleType) -> None:
    """In a drill, give every trainer an output folder inside the drill's scratch folder.

    A trainer makes its folder in its constructor, TRL writes a model card into it with every save, and callbacks write
    their logs there. The drill removes all of that, and the job's own folder stays as it was.
    """

    def redirect(arguments: Any) -> None:
        arguments.output_dir = os.fspath(run_folder(arguments.output_dir, os.environ[DRILL]))
        arguments.push_to_hub = False

    change_arguments(module, redirect)
