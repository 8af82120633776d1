"""`reprieve.ray.Run`: a plain loop in a Ray worker, with its checkpoints in Ray's folder of the run.

Ray is told of the last checkpoint of a finished run only, which is then `result.checkpoint`: whatever Ray's snapshot
names must stay for ever, and retention is ours.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import ray.train
from ray.train import Checkpoint, CheckpointUploadMode

from reprieve.adapters.loop import run as loop
from reprieve.adapters.ray import internals
from reprieve.adapters.ray.snapshot import named_checkpoints
from reprieve.adapters.ray.worker import CHECKPOINT_FOLDER
from reprieve.checkpoint.folder import paths
from reprieve.errors import ConfigError


class Run(loop.Run):
    """`reprieve.Run` in a Ray worker. Only the default of `uri` differs: a folder in Ray's folder of the run."""

    def __init__(self, uri: str | os.PathLike[str] | None = None, **options: Any) -> None:
        context = internals.worker_context()
        if uri is None and context.folder is None:
            raise ConfigError(
                "the storage_path of this run is not in a file system, which reprieve.ray.Run needs: use a shared "
                "folder as storage_path, or pass one, Run('/shared/checkpoints', …)"
            )
        if uri is None:
            uri = Path(str(context.folder)) / CHECKPOINT_FOLDER
        elif "://" not in os.fspath(uri) and not Path(uri).expanduser().is_absolute():
            raise ConfigError(
                f"{os.fspath(uri)!r} is relative, and Ray changes the working directory: write an absolute path, or "
                "leave it out to use Ray's folder of the run"
            )
        super().__init__(uri, **options)
        if context.folder is not None:  # an earlier end of this run, which was told to train on
            named = (paths.step_of(path) for path in named_checkpoints(context.folder))
            self._checkpointer.pin(*(step for step in named if step is not None))

    def finish(self) -> None:
        was_open = not self._session.closed
        super().finish()
        if was_open and (path := self._finished_checkpoint()) is not None:
            metrics = {name: float(value) for name, value in self._metrics.items()}
            ray.train.report(metrics, Checkpoint(str(path)), checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD)

    def _finished_checkpoint(self) -> Path | None:
        """Return the last checkpoint, if Ray can manage it: it is in its folder."""
        folder = internals.worker_context().folder
        path = paths.checkpoint(self._checkpointer.root, self.steps)
        return path if folder is not None and path.is_relative_to(folder.resolve()) and path.exists() else None
