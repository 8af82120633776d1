"""`reprieve.ray.Run`: a plain loop in a Ray worker, with its checkpoints in Ray's folder of the run.

Only the last checkpoint of a finished run is reported to Ray, and is then `result.checkpoint`: whatever Ray's snapshot
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
from reprieve.adapters.ray.config import check_absolute
from reprieve.adapters.ray.snapshot import named_checkpoints
from reprieve.adapters.ray.worker import CHECKPOINT_FOLDER
from reprieve.checkpoint.folder import paths
from reprieve.checkpoint.folder.lease import read_record
from reprieve.errors import ConfigError
from reprieve.launcher_protocol import START_OVER
from reprieve.settings import SETTINGS, is_object_store, resolve
from reprieve.storage.uri import local_path


class Run(loop.Run):
    """`reprieve.Run` in a Ray worker. Only the default of `uri` differs: `CHECKPOINT_URI` of the driver's environment,
    else a folder in Ray's folder of the run."""

    def __init__(self, uri: str | os.PathLike[str] | None = None, **options: Any) -> None:
        context = internals.worker_context()
        settings = resolve({"fresh": options.pop("fresh", None)}, options=False)
        # A protected worker has CHECKPOINT_URI: the driver's, or the folder of the run.
        default = settings.checkpoints
        if default is None and context.folder is not None:
            default = str(context.folder / CHECKPOINT_FOLDER)
        if uri is None and context.folder is None and (default is None or is_object_store(default)):
            raise ConfigError(
                "the storage_path of this run is not in a file system, which reprieve.ray.Run needs: use a shared "
                "folder as storage_path, or pass one, Run('/shared/checkpoints', …)"
            )
        folder = os.fspath(uri or default or "")
        check_absolute(folder)
        if settings.fresh:
            _start_over_once(local_path(folder), context)
        super().__init__(folder if settings.checkpoints is None else uri, **options)
        if context.folder is not None:  # this run may have ended before, and train further now
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


def _start_over_once(root: Path, context: internals.WorkerContext) -> None:
    """Let this `fit()` start over, and the generations after its first one resume."""
    os.environ[START_OVER] = context.run_id
    os.environ[SETTINGS["fresh"].env] = "false"
    record = read_record(root / paths.LEASE_FOLDER)
    if context.folder is None or (record is not None and record.started_over == context.run_id):
        return
    named = [path for path in named_checkpoints(context.folder) if path.parent.resolve() == root.resolve()]
    if named:
        raise ConfigError(
            f"fresh=True would move {named[-1]}, which is a result of this run: Ray refuses a run whose results are "
            "gone. To start over, use another RunConfig(name=…)"
        )
