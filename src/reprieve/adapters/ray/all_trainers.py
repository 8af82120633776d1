"""Protects every run of a driver that starts under `reprieve run`: the import hook calls `protect_all` for `ray.train`.

A `RunConfig` may say how (`jit_checkpoint_config=`), also with the imports that the proposal for Ray itself has:

    from ray.train import RunConfig
    from ray.train._internal.jit_checkpoint_config import JITCheckpointConfig
"""

from __future__ import annotations

import functools
import sys
from types import ModuleType
from typing import Any

from reprieve.launcher_protocol import Protected, send_once

_PROPOSED = "ray.train._internal.jit_checkpoint_config"


def protect_all(module: ModuleType) -> None:
    """Protect all trainers of this process. `module`: `ray.train`."""
    sys.modules["ray"].train = module  # type: ignore[attr-defined]  # Python sets it later, and Ray reads it before
    from reprieve.adapters.ray import driver, internals
    from reprieve.adapters.ray.config import JITCheckpointConfig, RunConfig

    module.RunConfig = RunConfig  # type: ignore[attr-defined]
    proposed = sys.modules[_PROPOSED] = ModuleType(_PROPOSED)
    proposed.JITCheckpointConfig = JITCheckpointConfig  # type: ignore[attr-defined]
    send_once(Protected())
    driver.wrap_fit()
    protected = internals.DataParallelTrainer.fit

    @functools.wraps(protected)
    def fit(trainer: Any) -> Any:
        config = getattr(trainer.run_config, "jit_checkpoint_config", None)
        if config is None:
            driver.protect(trainer)
        return protected(trainer)

    internals.DataParallelTrainer.fit = fit  # type: ignore[assignment, method-assign]


def protect_transformers() -> None:
    """Protect the trainers of transformers in a worker, from its import on."""
    from reprieve.import_hooks import call_when_imported

    call_when_imported({"transformers.trainer": "reprieve.adapters.transformers.all_trainers:protect_all"})
