"""What a person wants to know of a TrainJob, from the objects alone: its state, why, and its progress.

The operator writes state and progress into the job. Where no operator runs, or where its data is old, the state follows
from the job and its pods: it may say less, but nothing that is not so.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from typing import Any

from reprieve import exit_codes
from reprieve.kubernetes import pausing
from reprieve.kubernetes.jobs import training_progress
from reprieve.kubernetes.jobs.pods import Pod, pods_of, rank_zero
from reprieve.kubernetes.jobs.reports import Report
from reprieve.kubernetes.jobs.state import STALE_AFTER, JobState
from reprieve.kubernetes.jobs.training_progress import TrainingProgress
from reprieve.kubernetes.kinds import Object
from reprieve.kubernetes.names import PROGRESS_ANNOTATION
from reprieve.kubernetes.pausing import PauseRecord
from reprieve.run_state import RunState

_OF_RUN = {RunState.STARTING: JobState.STARTING, RunState.SAVING: JobState.SAVING}


class Source(str, Enum):
    """Where progress comes from."""

    OPERATOR = "operator"
    POD = "pod"
    TERMINATION_MESSAGE = "termination message"
    RECORD = "run record"
    """Of a run on this machine."""
    NOWHERE = ""

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True, kw_only=True)
class JobView:
    """A TrainJob at one time."""

    namespace: str
    name: str
    state: JobState
    reason: str
    """Why it is in this state; empty where there is nothing to say."""
    progress: TrainingProgress
    source: Source
    pause: PauseRecord | None
    """Who paused it; None: Reprieve did not, or it has been resumed."""
    pods: tuple[Pod, ...]
    now: datetime

    @property
    def is_stale(self) -> bool:
        """Whether the progress is older than somebody who reads it would expect."""
        if self.state not in (JobState.RUNNING, JobState.SAVING, JobState.UNKNOWN):
            return False
        updated = self.progress.last_update_time
        return updated is not None and self.now - updated > STALE_AFTER

    def to_json(self) -> Object:
        """`progress` has the fields of `status.trainingProgress`."""
        return {
            "namespace": self.namespace,
            "name": self.name,
            "state": str(self.state),
            "reason": self.reason,
            "stale": self.is_stale,
            "source": str(self.source),
            "pausedBy": None if self.pause is None else json.loads(self.pause.to_json()),
            "pods": [{"name": pod.name, "rank": pod.rank, "phase": pod.phase} for pod in self.pods],
            "progress": {
                name: value
                for name, value in self.progress.to_json().items()
                if name not in ("state", "reason", "stale")
            },
        }


def stored_progress(job: Mapping[str, Any]) -> TrainingProgress | None:
    """Return what an operator has written: to the status, or to the annotation where the status has no such field."""
    content = (job.get("status") or {}).get("trainingProgress")
    if content is None:
        try:
            content = json.loads((job["metadata"].get("annotations") or {})[PROGRESS_ANNOTATION])
        except (KeyError, TypeError, ValueError, RecursionError):
            return None
    progress, _ = training_progress.parse(content)
    return progress if progress.state is not None else None


def view_of(
    job: Mapping[str, Any],
    workload: Mapping[str, Any] | None,
    pods: Sequence[Mapping[str, Any]],
    *,
    now: datetime,
    report: Report | None = None,
) -> JobView:
    """`report`: what rank 0 has reported itself, where no operator has written it."""
    trainers, stored = tuple(pods_of(job, pods)), stored_progress(job)
    progress = stored or (report.progress if report is not None else TrainingProgress())
    source = Source.NOWHERE
    if stored is not None:
        source = Source.OPERATOR
    elif report is not None:
        source = Source.TERMINATION_MESSAGE if report.message is not None else Source.POD
    state, reason = _state(job, workload, trainers, stored, report)
    paused = pausing.pause_of(job, workload)
    return JobView(
        namespace=str(job["metadata"].get("namespace", "")),
        name=str(job["metadata"]["name"]),
        state=state,
        reason=reason,
        progress=progress,
        source=source,
        pause=paused,
        pods=trainers,
        now=now,
    )


def _state(
    job: Mapping[str, Any],
    workload: Mapping[str, Any] | None,
    pods: Sequence[Pod],
    stored: TrainingProgress | None,
    report: Report | None,
) -> tuple[JobState, str]:
    """What is certain first, then what the operator says, then what follows from the pods."""
    if end := pausing.end_of(job):
        return (JobState.SUCCEEDED, "") if end == "Complete" else (JobState.FAILED, _message(job, end))
    unfinished = [pod for pod in pods if not pod.has_ended]
    if pausing.is_suspended(job) or (workload is not None and pausing.pause_of(job, workload)):
        if any(pod.is_running for pod in unfinished):
            return JobState.SAVING, "stopping"
        return _at_rest(job, workload, stored)
    if stored is not None:
        with_name = [state for state in JobState if state.value == stored.state]
        if with_name and not (with_name[0].is_end or with_name[0] == JobState.PAUSED):
            return with_name[0], stored.reason or ""
    return _from_pods(unfinished, pods, report)


def _at_rest(
    job: Mapping[str, Any], workload: Mapping[str, Any] | None, stored: TrainingProgress | None
) -> tuple[JobState, str]:
    if pause := pausing.pause_of(job, workload):
        return JobState.PAUSED, f"paused by {pause}"
    if not pausing.is_queued(job, workload):
        return JobState.PAUSED, pausing.why_it_stands_still(job, workload)
    preempted = stored is not None and stored.state == JobState.PREEMPTED
    return JobState.PREEMPTED if preempted else JobState.PENDING, pausing.why_it_stands_still(job, workload)


def _from_pods(unfinished: Sequence[Pod], pods: Sequence[Pod], report: Report | None) -> tuple[JobState, str]:
    if not unfinished:
        last = rank_zero(pods)
        if last is None or last.exit_code is None:
            return JobState.PENDING, "no pods yet"
        if last.exit_code == exit_codes.PREEMPTED:
            return JobState.PREEMPTED, "it starts again"
        return JobState.PENDING, f"restarting: rank 0 ended with exit code {last.exit_code}"
    if stopping := [pod for pod in unfinished if pod.is_deleted and pod.is_running]:
        return JobState.SAVING, f"stopping: pod {stopping[0].name} is being deleted"
    waiting = [pod for pod in unfinished if not pod.is_running]
    if waiting:
        reasons = ", ".join(
            f"rank {pod.rank} Pending" + (f" ({pod.why_it_waits})" if pod.why_it_waits else "") for pod in waiting
        )
        return (JobState.PENDING if len(waiting) == len(unfinished) else JobState.WAITING_FOR_PEERS), reasons
    reported = None if report is None else report.progress.state
    return _OF_RUN.get(RunState(reported), JobState.RUNNING) if reported else JobState.RUNNING, ""


def _message(job: Mapping[str, Any], end: str) -> str:
    conditions = (job.get("status") or {}).get("conditions") or ()
    return next((str(each.get("message", "")) for each in conditions if each.get("type") == end), "")
