"""The verbs for TrainJobs: get, list, pause, resume, wait, checkpoints, logs. For the command line and the SDK.

    TrainJobs ─► Cluster (lightkube, or the client of the Kubeflow SDK) ─► API server
        └─► pausing, job_view: what to patch, and what the objects say (pure functions)

Progress comes from the operator. Where none runs, it comes from rank 0: over HTTP through the API server where rights
allow (`pods/proxy`), else from the termination message of a pod that has ended.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from reprieve.clock import Clock, SystemClock
from reprieve.errors import ApiUnreachable, ObjectChanged
from reprieve.kubernetes import pausing
from reprieve.kubernetes.jobs import job_log
from reprieve.kubernetes.jobs.cluster import Cluster
from reprieve.kubernetes.jobs.job_view import JobView
from reprieve.kubernetes.jobs.pods import Pod
from reprieve.kubernetes.jobs.reader import JobReader, report_of
from reprieve.kubernetes.jobs.stop import StopWatch, WaitTimeout
from reprieve.kubernetes.jobs.training_progress import AvailableCheckpoint, step_of
from reprieve.kubernetes.pausing import MergePatch

log = logging.getLogger("reprieve")

ATTEMPTS = 5
"""Each conflict means that somebody has written the object in the meantime: Trainer, Kueue, or the operator."""
POLL_S = 1.0
GRACE_MARGIN = timedelta(seconds=60)
"""Beyond the grace period of the pods: for Kueue, JobSet and the kubelet to pass a pause on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PauseOutcome:
    """How a pause ended."""

    name: str
    step: int | None
    """The last completed step; None: training had not begun, or it is not known."""
    is_saved: bool | None
    """Whether that step is saved; None: not known."""
    checkpoint: str | None
    """The newest checkpoint, from which a resume continues, if it is known."""
    message: str
    """The exit message of rank 0's launcher."""
    took: timedelta
    """Until all pods had stopped."""
    was_paused: bool
    """It was paused already."""


class TrainJobs:
    """The TrainJobs of one namespace.

    by: who pauses jobs, as the record of a pause names it.
    """

    def __init__(self, cluster: Cluster, *, by: str = "reprieve pause", clock: Clock | None = None) -> None:
        self._cluster = cluster
        self._by = by
        self._clock = clock or SystemClock()
        self._reader = JobReader(cluster, self._clock)

    def get(self, name: str) -> JobView:
        """JobNotFound: there is none with this name."""
        return self._reader.view(name)

    def all(self) -> list[JobView]:
        """Return all jobs, newest first."""
        return self._reader.views()

    def pause(
        self, name: str, *, reason: str = "", wait: bool = True, timeout: timedelta | None = None
    ) -> PauseOutcome:
        """Save a job and stop it, and wait until all its pods have stopped.

        `timeout`: default: the grace period of the pods and a minute. CannotPause: it has ended, or somebody else has
        suspended it. WaitTimeout: pods still run. The job remains paused.
        """
        began, ended = self._clock.monotonic(), None
        watch = StopWatch(self._cluster, self._reader, name, self._clock) if wait else None
        has_changed = self._patch(
            name,
            lambda job, workload: pausing.pause(job, workload, by=self._by, now=self._reader.now(), reason=reason),
        )
        if watch is not None:
            ended = watch.wait(timeout or watch.grace + GRACE_MARGIN)
        took = timedelta(seconds=self._clock.monotonic() - began)
        return self._outcome(name, ended, took, was_paused=not has_changed)

    def resume(self, name: str) -> JobView:
        """Undo a pause of Reprieve. CannotResume: there is none."""
        self._patch(name, pausing.resume)
        return self.get(name)

    def wait(
        self,
        name: str,
        condition: Callable[[JobView], bool],
        *,
        timeout: timedelta | None = None,
        interval_s: float = POLL_S,
    ) -> JobView:
        """Wait until a condition holds, and return the job. WaitTimeout: it does not, in time.

        Jobs take days, so an API server that is away for a while only delays the answer.
        """
        deadline = None if timeout is None else self._clock.monotonic() + timeout.total_seconds()
        view, is_away = None, False
        while True:
            try:
                view, is_away = self.get(name), False
                if condition(view):
                    return view
            except ApiUnreachable as error:
                if not is_away:
                    log.warning("%s; trying again", error)
                is_away = True
            if deadline is not None and timeout is not None and self._clock.monotonic() >= deadline:
                state = f"still {view.state}" if view is not None else "unknown: the API server does not answer"
                because = f" ({view.reason})" if view is not None and view.reason else ""
                raise WaitTimeout(f"{name} is {state}{because} after {timeout.total_seconds():.0f} s")
            self._clock.sleep(interval_s)

    def checkpoints(self, name: str) -> tuple[AvailableCheckpoint, ...]:
        """Return the checkpoints in the folder of a job, newest first, as rank 0 has last reported them."""
        found = self.get(name).progress.checkpointing
        listed, latest = found.available_checkpoints or (), found.latest_checkpoint
        if latest is None or any(each.path == latest for each in listed):
            return listed
        # A termination message has only the newest; the list is older then.
        newest = AvailableCheckpoint(
            path=latest,
            step=step_of(latest),
            created=found.latest_checkpoint_time,
            bytes=found.latest_checkpoint_bytes,
        )
        return (newest, *listed)

    def read_log(self, name: str, *, rank: int = 0, follow: bool = False, lines: int | None = None) -> Iterator[str]:
        """Yield the lines of a rank's log. `follow`: over all further starts of the job, until it ends or is paused."""
        return job_log.read(self._cluster, self._reader, name, self._clock, rank=rank, follow=follow, lines=lines)

    def _patch(
        self, name: str, patches: Callable[[Mapping[str, Any], Mapping[str, Any] | None], list[MergePatch]]
    ) -> bool:
        """Write what a function of the job and its Workload returns, and return whether that was anything."""
        for attempt in range(1, ATTEMPTS + 1):
            job = self._reader.job(name)
            try:
                changes = patches(job, self._reader.workload(job))
                for change in changes:
                    self._cluster.patch(change)
                return bool(changes)
            except ObjectChanged:
                if attempt == ATTEMPTS:
                    raise
        raise AssertionError

    def _outcome(self, name: str, ended: Pod | None, took: timedelta, *, was_paused: bool) -> PauseOutcome:
        report = report_of(ended, self._reader.now()) if ended is not None else None
        progress = report.progress if report is not None else self.get(name).progress
        return PauseOutcome(
            name=name,
            step=progress.step,
            is_saved=progress.saved,
            checkpoint=progress.checkpointing.latest_checkpoint,
            message=(report.message if report is not None else None) or "",
            took=took,
            was_paused=was_paused,
        )
