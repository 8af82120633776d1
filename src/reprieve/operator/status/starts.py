"""The starts of a job: what each one that ended has left behind, and how many in a row left nothing new.

A start is one pod of rank 0. The status holds the last one that was counted, so that an operator that takes over counts
none of them twice.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime

from reprieve import exit_codes
from reprieve.kubernetes.jobs.reports import NoReport, Report, from_termination_message
from reprieve.kubernetes.jobs.state import JobState
from reprieve.kubernetes.jobs.training_progress import LastExit, TrainingProgress
from reprieve.operator.status.merge import with_report
from reprieve.operator.status.objects import ObservedPod
from reprieve.operator.status.observed import Observed

MAX_STARTS_WITHOUT_PROGRESS = 5
NO_PROGRESS = "NoProgress"
_MAX_MESSAGE_LENGTH = 300


def with_ended_starts(observed: Observed, progress: TrainingProgress) -> TrainingProgress:
    """Return the progress with all starts that have ended since it was written, and with what they reported."""
    progress = _after_resume(observed, progress)
    for pod in _new_ends(observed, progress):
        progress = _with_end(observed, progress, pod)
    return progress


def is_without_progress(progress: TrainingProgress) -> bool:
    return (progress.starts_without_progress or 0) >= MAX_STARTS_WITHOUT_PROGRESS


def _after_resume(observed: Observed, progress: TrainingProgress) -> TrainingProgress:
    """Somebody has resumed a job that was paused because it made no progress: it gets as many starts again."""
    stopped, job = progress.condition(NO_PROGRESS), observed.job
    # In a queue, it stays suspended until Kueue admits it again: there, the record of the pause says when it is over.
    is_resumed = not job.is_suspended or (job.is_queued and job.pause is None)
    if stopped is None or not stopped.holds or progress.state != JobState.PAUSED or not is_resumed:
        return progress
    return replace(progress, starts_without_progress=0)


def _new_ends(observed: Observed, progress: TrainingProgress) -> list[ObservedPod]:
    """The pods of rank 0 that have run and ended, and are not counted yet, in the order of their ends."""
    last = progress.last_exit
    ended = [pod for pod in observed.pods if pod.rank == 0 and (pod.has_ended or (pod.is_gone and _has_run(pod)))]
    if last is not None:
        counted = (last.time or observed.now, last.pod or "")
        ended = [pod for pod in ended if pod.name != last.pod and _order(observed, pod) > counted]
    return sorted(ended, key=lambda pod: _order(observed, pod))


def _order(observed: Observed, pod: ObservedPod) -> tuple[datetime, str]:
    """Kubernetes' times are whole seconds, so the name decides between ends in the same one: no end counts twice."""
    return _end(observed, pod), pod.name


def _has_run(pod: ObservedPod) -> bool:
    return pod.has_ended or pod.container.started is not None


def _end(observed: Observed, pod: ObservedPod) -> datetime:
    return pod.container.ended or pod.gone_at or observed.now


def _with_end(observed: Observed, progress: TrainingProgress, pod: ObservedPod) -> TrainingProgress:
    report = last_report(observed, pod)
    before = max(_step(progress.last_exit.checkpoint_step if progress.last_exit else None), -1)
    if report is not None:
        progress = with_report(progress, report, observed.now)
        before = max(before, _step(report.progress.resumed_from_step))
    container, latest = pod.container, progress.latest_step
    exit_code = container.exit_code
    has_progress = _step(latest) > before
    # A job that is suspended does not restart, one that is complete or failed for good neither.
    counts = not observed.job.is_suspended and exit_code not in (exit_codes.FINISHED, exit_codes.PERMANENT_FAILURE)
    starts = progress.starts_without_progress or 0
    return replace(
        progress,
        pod=pod.name,
        starts_without_progress=0 if has_progress else starts + int(counts),
        last_exit=LastExit(
            pod=pod.name,
            time=_end(observed, pod),
            exit_code=exit_code,
            reason=f"Disrupted: {pod.disruption}" if pod.disruption else container.exit_reason or None,
            message=_message(report, container.message),
            checkpoint_step=latest,
        ),
    )


def last_report(observed: Observed, pod: ObservedPod) -> Report | None:
    """The termination message of a pod, or else the last answer of it."""
    try:
        return from_termination_message(pod.container.message, pod.name, observed.now)
    except NoReport:
        return observed.report if observed.report is not None and observed.report.pod == pod.name else None


def _message(report: Report | None, text: str) -> str | None:
    """The launcher's last line; where there is none, what the container runtime or another program has written."""
    found = report.message if report is not None else None
    if found is None and not text.startswith("{"):
        found = " ".join(text.split())
    return found[:_MAX_MESSAGE_LENGTH] if found else None


def _step(found: int | None) -> int:
    return -1 if found is None else found
