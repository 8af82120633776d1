"""Those who write a run down (TensorBoard, W&B, MLflow) go on with the same run after a resume, not with a new one."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from reprieve.adapters.transformers.patching import replaced

log = logging.getLogger("reprieve")

_VARIABLES = {"wandb": "WANDB_RUN_ID", "mlflow": "MLFLOW_RUN_ID"}
"""By which a user says which run it is."""


def ids(trainer: Any) -> dict[str, str]:
    """How each of them calls this run, of those that have begun."""
    found: dict[str, str] = {}
    board = _callback(trainer, "TensorBoardCallback")
    if board is not None and getattr(board, "tb_writer", None) is not None and board.logging_dir:
        found["tensorboard"] = str(board.logging_dir)
    return found | {name: run for name in _VARIABLES if (run := _active(trainer, name)) is not None}


@contextlib.contextmanager
def going_on(trainer: Any, known: Mapping[str, str]) -> Iterator[None]:
    """While inside, they begin with what is known. What the user has said himself holds."""
    board = _callback(trainer, "TensorBoardCallback")
    if board is not None and "tensorboard" in known and getattr(board, "logging_dir", None) is None:
        board.logging_dir = known["tensorboard"]
    with contextlib.ExitStack() as stack:
        for name, variable in _VARIABLES.items():
            if name not in known or variable in os.environ:
                continue
            if (active := _active(trainer, name)) is None:
                stack.enter_context(_BEGINNING[name](known[name]))
            elif active != known[name]:  # two at once are an error to MLflow
                log.warning(
                    "the script has begun a run of %s itself, %s: it is not the one from before the resume, %s",
                    name,
                    active,
                    known[name],
                )
        yield


@contextlib.contextmanager
def _wandb(run: str) -> Iterator[None]:
    """Not by its variable, which it remembers: a run that the script begins after training would be this one too."""
    try:
        import wandb
    except ImportError:  # not any more
        yield
        return
    with replaced(wandb, "init", functools.partial(wandb.init, id=run, resume="allow")):
        yield


@contextlib.contextmanager
def _mlflow(run: str) -> Iterator[None]:
    os.environ["MLFLOW_RUN_ID"] = run
    try:
        yield
    finally:
        os.environ.pop("MLFLOW_RUN_ID", None)


_BEGINNING = {"wandb": _wandb, "mlflow": _mlflow}


def _active(trainer: Any, name: str) -> str | None:
    if name == "wandb":
        run = getattr(sys.modules.get("wandb"), "run", None)
        return None if run is None else str(run.id)
    mlflow = sys.modules.get("mlflow")
    if mlflow is None or _callback(trainer, "MLflowCallback") is None or (run := mlflow.active_run()) is None:
        return None
    return str(run.info.run_id)


def _callback(trainer: Any, name: str) -> Any:
    return next((one for one in trainer.callback_handler.callbacks if type(one).__name__ == name), None)
