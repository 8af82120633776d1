"""Lets experiment trackers (TensorBoard, W&B, MLflow) continue the same run after a resume instead of a new one.

A checkpoint holds the run IDs (`run_ids`); while a resumed training runs, the trackers start with them
(`continued_runs`).
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from reprieve.adapters.transformers.patching import patched

log = logging.getLogger("reprieve")

_VARIABLES = {"wandb": "WANDB_RUN_ID", "mlflow": "MLFLOW_RUN_ID"}
"""The environment variables in which users choose a run."""


def run_ids(trainer: Any) -> dict[str, str]:
    """Return the run ID of each tracker that has started. TensorBoard's is a folder."""
    found: dict[str, str] = {}
    tensorboard = _callback(trainer, "TensorBoardCallback")
    if tensorboard is not None and getattr(tensorboard, "tb_writer", None) is not None and tensorboard.logging_dir:
        found["tensorboard"] = str(tensorboard.logging_dir)
    return found | {name: run_id for name in _VARIABLES if (run_id := _active_run(trainer, name)) is not None}


@contextlib.contextmanager
def continued_runs(trainer: Any, saved_ids: Mapping[str, str]) -> Iterator[None]:
    """Start each tracker with its saved run ID, unless the user has chosen a run."""
    tensorboard = _callback(trainer, "TensorBoardCallback")
    if tensorboard is not None and "tensorboard" in saved_ids and getattr(tensorboard, "logging_dir", None) is None:
        tensorboard.logging_dir = saved_ids["tensorboard"]
    with contextlib.ExitStack() as stack:
        for name, variable in _VARIABLES.items():
            if name not in saved_ids or variable in os.environ:
                continue
            if (active := _active_run(trainer, name)) is None:
                stack.enter_context(_CONTINUE[name](saved_ids[name]))
            elif active != saved_ids[name]:  # MLflow allows one active run
                log.warning(
                    "the script has started a %s run itself (%s): run %s from before the resume is not continued",
                    name,
                    active,
                    saved_ids[name],
                )
        yield


@contextlib.contextmanager
def _wandb_run(run_id: str) -> Iterator[None]:
    """Pass the ID to `wandb.init`. W&B remembers its variable: a later run of the script would reuse the ID."""
    try:
        import wandb
    except ImportError:  # uninstalled since
        yield
        return
    with patched(wandb, "init", functools.partial(wandb.init, id=run_id, resume="allow")):
        yield


@contextlib.contextmanager
def _mlflow_run(run_id: str) -> Iterator[None]:
    os.environ["MLFLOW_RUN_ID"] = run_id
    try:
        yield
    finally:
        os.environ.pop("MLFLOW_RUN_ID", None)


_CONTINUE = {"wandb": _wandb_run, "mlflow": _mlflow_run}


def _active_run(trainer: Any, name: str) -> str | None:
    if name == "wandb":
        run = getattr(sys.modules.get("wandb"), "run", None)
        return None if run is None else str(run.id)
    mlflow = sys.modules.get("mlflow")
    if mlflow is None or _callback(trainer, "MLflowCallback") is None or (run := mlflow.active_run()) is None:
        return None
    return str(run.info.run_id)


def _callback(trainer: Any, class_name: str) -> Any:
    callbacks = trainer.callback_handler.callbacks
    return next((callback for callback in callbacks if type(callback).__name__ == class_name), None)
