"""Jobs of the LocalProcess backend: runs of `reprieve run` on this machine, and their run records.

It has the verbs of `TrainJobs`, so that notebooks treat both alike.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from kubeflow.trainer.constants.constants import TRAINJOB_FAILED

from reprieve.checkpoint.folder.catalog import list_checkpoints
from reprieve.errors import ConfigError, ReprieveError
from reprieve.kubernetes.jobs.job_view import JobView, Source
from reprieve.kubernetes.jobs.state import JobState
from reprieve.kubernetes.jobs.stop import WaitTimeout
from reprieve.kubernetes.jobs.train_jobs import PauseOutcome
from reprieve.kubernetes.jobs.training_progress import AvailableCheckpoint, Checkpoints, TrainingProgress
from reprieve.launch.runs.run_record import RunRecord, Runs
from reprieve.launcher_protocol import Pause, send_once
from reprieve.run_state import RunState
from reprieve.sdk.job_options import new_name
from reprieve.sdk.trainer import TransformersTrainer

POLL_S = 0.2
JOB = "REPRIEVE_JOB"
"""The variable with the name of the job, in the environment that a run record has. Not the name of the run: checkpoints
of a named run are its own, and a function that is submitted again is another job that continues from them."""

_STATES = {
    RunState.STARTING: JobState.STARTING,
    RunState.WAITING: JobState.PENDING,
    RunState.STOPPING: JobState.SAVING,
    RunState.SAVING: JobState.SAVING,
    RunState.PAUSED: JobState.PAUSED,
    RunState.PREEMPTED: JobState.PREEMPTED,
    RunState.STOPPED: JobState.PREEMPTED,
    RunState.FINISHED: JobState.SUCCEEDED,
    RunState.FAILED: JobState.FAILED,
    RunState.HUNG: JobState.FAILED,
    RunState.LOST: JobState.FAILED,
}


class JobStopped(ReprieveError):
    """A job of this machine that was waited for has been stopped, and nothing here starts it again."""


def local_trainer(trainer: TransformersTrainer) -> TransformersTrainer:
    """Return the trainer with its folder as an absolute path, from where the trainer was made."""
    if trainer.needs_volume:
        raise ConfigError(
            f"output_dir={trainer.output_dir}: processes of this machine have no claims and no object stores: write a "
            "folder, such as output_dir='checkpoints'"
        )
    if trainer.output_dir is None:
        return trainer
    return replace(trainer, output_dir=str(trainer.current_folder / Path(trainer.output_dir).expanduser()))


@dataclass(frozen=True)
class LocalOptions:
    """The option by which the run of a job is found again. It changes what the backend gets: a CustomTrainer."""

    trainer: TransformersTrainer

    def __call__(self, job_spec: dict[str, Any], trainer: Any, backend: object) -> None:
        name = job_spec.setdefault("metadata", {}).setdefault("name", new_name())
        # The backend's process gets these variables and no others.
        trainer.env = {**os.environ, **self.trainer.environment(), **(trainer.env or {}), JOB: name}


class LocalJobs:
    """The jobs of this machine, by name.

    backend: of the SDK. It knows jobs of this process before they have a run record: while packages are installed.
    """

    def __init__(self, backend: Any) -> None:
        self._runs = Runs()
        self._backend = backend

    def get(self, name: str) -> JobView:
        try:
            return _view(self._record(name), name)
        except ConfigError:
            with contextlib.suppress(ValueError):
                has_failed = self._backend.get_job(name).status == TRAINJOB_FAILED
                return _view_without_record(name, has_failed=has_failed)
            raise

    def pause(
        self, name: str, *, reason: str = "", wait: bool = True, timeout: timedelta | None = None
    ) -> PauseOutcome:
        record, began = self._record(name), time.monotonic()
        was_paused = record.state_now == RunState.PAUSED
        if not was_paused:
            # A launcher that has just written the end lives on for a moment.
            if not record.alive or _state_of(record).is_end:
                raise ConfigError(f"{name} is not running: {record.state_now}")
            if not send_once(Pause(), record.socket):
                raise ConfigError(f"{name} does not respond: kill -TERM {record.pid} stops it, too")
            if wait:
                self.wait(name, lambda view: not self._record(name).alive, timeout=timeout)
        record = self._record(name)
        view = _view(record, name)
        return PauseOutcome(
            name=name,
            step=view.progress.step,
            is_saved=record.state == RunState.PAUSED and record.checkpoint_step == record.step if wait else None,
            checkpoint=view.progress.checkpointing.latest_checkpoint,
            message=record.reason,
            took=timedelta(seconds=time.monotonic() - began),
            was_paused=was_paused,
        )

    def resume(self, name: str) -> JobView:
        record = self._record(name)
        if record.alive:
            raise ConfigError(f"{name} is running already (pid {record.pid})")
        done = subprocess.run(  # noqa: S603 - this program
            [sys.executable, "-m", "reprieve", "resume", "--detach", record.name],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise ConfigError(f"{name} cannot be resumed: {done.stderr.strip()}")
        return self.get(name)

    def wait(
        self,
        name: str,
        condition: Callable[[JobView], bool],
        *,
        timeout: timedelta | None = None,
        interval_s: float = POLL_S,
    ) -> JobView:
        """Raise JobStopped for a job that has been stopped, but not paused, before the condition holds."""
        deadline = None if timeout is None else time.monotonic() + timeout.total_seconds()
        while not condition(view := self.get(name)):
            if view.state == JobState.PREEMPTED and not (record := self._record(name)).alive:
                saved = f"saved at step {record.checkpoint_step}" if record.checkpoint_step else "has no checkpoint"
                raise JobStopped(
                    f"{name} was stopped at step {record.step}, and {saved}: resume({name!r}) continues it, or submit "
                    "it again"
                )
            if deadline is not None and time.monotonic() >= deadline:
                raise WaitTimeout(f"{name} is still {view.state}")
            time.sleep(interval_s)
        return view

    def _record(self, name: str) -> RunRecord:
        """ConfigError: no run of this machine belongs to a job with this name."""
        found = next((each for each in self._runs.all() if each.environment.get(JOB) == name), None)
        return found or self._runs.find(name)

    def checkpoints(self, name: str) -> tuple[AvailableCheckpoint, ...]:
        folder = self._record(name).checkpoints
        found = list_checkpoints(Path(folder)) if folder else ()
        return tuple(
            AvailableCheckpoint(
                path=str(each.path),
                step=each.step,
                created=each.created,
                bytes=each.bytes,
                valid=each.problem is None,
                reason=each.problem,
            )
            for each in found
        )


def _view_without_record(name: str, *, has_failed: bool) -> JobView:
    return JobView(
        namespace="",
        name=name,
        state=JobState.FAILED if has_failed else JobState.PENDING,
        reason="it could not be started: see get_job_logs" if has_failed else "packages are installed",
        progress=TrainingProgress(),
        source=Source.NOWHERE,
        pause=None,
        pods=(),
        now=datetime.now(timezone.utc),
    )


def _state_of(record: RunRecord) -> JobState:
    return _STATES.get(record.state_now, JobState.RUNNING)


def _view(record: RunRecord, name: str) -> JobView:
    is_known = bool(record.checkpoints) and record.checkpoint_step is not None
    values: Mapping[str, Any] = {
        "state": str(record.state_now),
        "run": record.name,
        "step": record.step,
        "percent_complete": None if record.done is None else f"{100 * record.done:.1f}",
        "estimated_remaining_seconds": None if record.eta_s is None else round(record.eta_s),
        "restarts": record.restarts,
        "last_update_time": datetime.fromtimestamp(record.updated, timezone.utc),
        "checkpointing": Checkpoints(
            latest_checkpoint=f"{record.checkpoints}/checkpoint-{record.checkpoint_step}" if is_known else None
        ),
    }
    return JobView(
        namespace="",
        name=name,
        state=_state_of(record),
        reason=record.reason,
        progress=TrainingProgress(**values),
        source=Source.RECORD,
        pause=None,
        pods=(),
        now=datetime.now(timezone.utc),
    )
