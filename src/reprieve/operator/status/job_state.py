"""What a job is doing, in one word and a reason. The word never says more than is known.

suspended ─► Paused │ Preempted (by Kueue) │ Pending (in its queue) │ Saving, while pods still run
no pod of rank 0 runs ─► Pending │ Preempted (it will start again)
it runs ─► WaitingForPeers ─► Starting ─► Running ⇄ Saving        no answer for 90 s, or none at all ─► Unknown
its end ─► Succeeded │ Failed
"""

from __future__ import annotations

from datetime import datetime, timedelta

from reprieve import exit_codes
from reprieve.kubernetes.jobs.state import STALE_AFTER, JobState
from reprieve.kubernetes.jobs.training_progress import LastExit, TrainingProgress
from reprieve.kubernetes.pausing import PauseRecord
from reprieve.operator.status.objects import ObservedPod
from reprieve.operator.status.observed import Observed, why_it_waits
from reprieve.run_state import RunState

NODE_LOST_AFTER = timedelta(seconds=15)
"""How long after its grace period a pod may take to go, before its node counts as lost."""
SILENT_AFTER = timedelta(minutes=10)
"""How long after its start a pod may answer nothing at all. Its program loads packages and a model first."""
STOPS_WITHIN = timedelta(minutes=10)
"""How long after a pause rank 0 may still run, besides the grace period of the job: a runtime may have a longer one."""
MAX_PEERS_LISTED = 3
NOT_STARTED = (127, 128)
"""The command was not found: that of the container, or the one that the launcher starts."""


Found = tuple[JobState, str]


def state_of(observed: Observed, progress: TrainingProgress) -> Found:
    """Return the state and its reason. `progress`: what is known, with the last exit."""
    job, pod = observed.job, observed.rank_zero
    if job.end == "Complete":
        return JobState.SUCCEEDED, ""
    if job.end:
        last = progress.last_exit
        return JobState.FAILED, (last.message if last is not None and last.message else job.end_message) or ""
    is_on = pod is not None and pod.is_running
    if job.is_suspended and not is_on:
        return _suspended(observed, progress)
    if pod is None or pod.has_ended:
        return _between_starts(progress, pod)
    if not is_on:
        return JobState.PENDING, _waiting([("rank 0", pod)])
    return _running(observed, pod, progress)


def is_stale(observed: Observed, state: JobState, progress: TrainingProgress) -> bool:
    """Whether the values are older than somebody who reads them would expect."""
    updated = progress.last_update_time
    if updated is None or state not in (JobState.RUNNING, JobState.SAVING, JobState.UNKNOWN):
        return False
    return observed.now - updated > STALE_AFTER


def is_lost(observed: Observed, pod: ObservedPod) -> bool:
    """Whether the pod's node does not answer: the pod is deleted, and nobody there ends it."""
    if pod.deleted_at is None or pod.is_gone or pod.has_ended:
        return False
    return observed.now - pod.deleted_at > NODE_LOST_AFTER


def pause_of(observed: Observed, progress: TrainingProgress) -> PauseRecord | None:
    """Return the pause that holds, by its record. The operator does not observe Workloads of Kueue: the record stays
    if the Workload could not be deactivated, or if somebody else has activated it. Then rank 0 ran on."""
    job, last = observed.job, progress.last_exit
    if job.pause is None or not job.pause.workload or last is None or last.time is None:
        return job.pause
    within = STOPS_WITHIN + (job.settings.grace_period or timedelta(0))
    has_run_on = last.exit_code is not None and last.time - job.pause.time > within
    return None if has_run_on else job.pause


def _suspended(observed: Observed, progress: TrainingProgress) -> Found:
    job = observed.job
    if pause := pause_of(observed, progress):
        return JobState.PAUSED, f"paused by {pause}"
    if not job.is_queued:
        return JobState.PAUSED, "spec.suspend is true"
    if progress.last_exit is None and progress.pod is None:
        return JobState.PENDING, "waits for quota of Kueue"
    return JobState.PREEMPTED, "Kueue has stopped it; it resumes when there is quota"


def _between_starts(progress: TrainingProgress, pod: ObservedPod | None) -> Found:
    """No pod of rank 0 runs, and nobody has suspended the job."""
    last = progress.last_exit
    if last is None or (pod is not None and pod.name != last.pod):
        return JobState.PENDING, "no pod of rank 0 yet" if pod is None else ""
    if last.exit_code == exit_codes.FINISHED:
        return JobState.RUNNING, "rank 0 has ended with 0; waiting for the job to complete"
    if was_preempted(last):
        return JobState.PREEMPTED, last.message or "rank 0 was stopped"
    if last.exit_code == exit_codes.PERMANENT_FAILURE:
        return JobState.PENDING, f"{how_it_ended(last)}: a permanent failure, which fails the job"
    why = f": {last.message}" if last.exit_code in NOT_STARTED and last.message else ""
    return JobState.PENDING, f"restarting: {how_it_ended(last)}{why}"


def was_preempted(last: LastExit) -> bool:
    is_disrupted = (last.reason or "").startswith("Disrupted") and last.exit_code != exit_codes.FINISHED
    return last.exit_code == exit_codes.PREEMPTED or is_disrupted


def how_it_ended(last: LastExit) -> str:
    """Say how a start ended: `exit code 137 (OOMKilled)`."""
    if last.exit_code is None:
        return "rank 0's pod is gone, and nobody saw how it ended"
    reason = f" ({last.reason})" if last.reason and last.reason != "Error" else ""
    return f"rank 0 ended with exit code {last.exit_code}{reason}"


def _running(observed: Observed, pod: ObservedPod, progress: TrainingProgress) -> Found:
    report = observed.live_report
    reported = None if report is None else report.progress.state
    if is_lost(observed, pod):
        return JobState.UNKNOWN, f"since {_clock(pod.deleted_at)}: node {pod.node} does not answer"
    if pod.deleted_at is not None and reported not in (RunState.STOPPED, RunState.FAILED):
        because = f" ({pod.disruption})" if pod.disruption else ""
        return JobState.SAVING, f"stopping{because}"
    if report is None and progress.pod == pod.name and progress.state in list(JobState):
        return _as_stored(observed, progress)
    if report is None or reported == RunState.STARTING:
        if waiting := _waiting_peers(observed):
            return JobState.WAITING_FOR_PEERS, waiting
        return (JobState.STARTING, "") if report is not None else _silent(observed, pod)
    reached = observed.reached_at
    if observed.unreachable and reached is not None and observed.now - reached > STALE_AFTER:
        return JobState.UNKNOWN, f"since {_clock(reached)}: {observed.unreachable}"
    return _as_reported(observed, str(reported), progress)


def _as_stored(observed: Observed, progress: TrainingProgress) -> Found:
    """This operator has not reached the pod yet, but the one that led before it has."""
    updated = progress.last_update_time
    if observed.unreachable and (updated is None or observed.now - updated > STALE_AFTER):
        return JobState.UNKNOWN, f"since {_clock(updated)}: {observed.unreachable}"
    return JobState(progress.state), progress.reason or ""


def _as_reported(observed: Observed, reported: str, progress: TrainingProgress) -> Found:
    reason = observed.report.progress.reason if observed.report is not None else None
    match reported:
        case RunState.SAVING:
            return JobState.SAVING, ""
        case RunState.STOPPED:
            return JobState.PREEMPTED, reason or "stopped; the pod has not ended yet"
        case RunState.FAILED:
            return JobState.PENDING, f"restarting: {reason or 'it failed'}"
        case RunState.FINISHED:
            return JobState.RUNNING, "training is finished; the pod has not ended yet"
    updated = progress.last_update_time
    if updated is not None and observed.now - updated > STALE_AFTER:
        return JobState.RUNNING, f"no news from training since {_clock(updated)}"
    return JobState.RUNNING, "evaluating" if reported == RunState.EVALUATING else ""


def _silent(observed: Observed, pod: ObservedPod) -> Found:
    """It runs, and has never answered."""
    why = pod.why_not_polled or observed.unreachable
    if not why:
        return JobState.STARTING, "no progress yet"
    started = pod.container.started
    if started is not None and observed.now - started > SILENT_AFTER:
        return JobState.UNKNOWN, f"no answer since it started at {_clock(started)}: {why}"
    return JobState.STARTING, f"no progress yet: {why}"


def _waiting_peers(observed: Observed) -> str:
    waiting = [
        (f"rank {rank}", pod)
        for rank, pod in observed.peers.items()
        if pod is None or (not pod.is_running and not pod.has_ended)
    ]
    return _waiting(waiting)


def _waiting(pods: list[tuple[str, ObservedPod | None]]) -> str:
    """`rank 1 Pending (Insufficient cpu)`, for each that waits."""
    found = []
    for name, pod in pods[:MAX_PEERS_LISTED]:
        if pod is None:
            found.append(f"{name} has no pod yet")
        else:
            why = why_it_waits(pod)
            found.append(f"{name} Pending ({why})" if why else f"{name} Pending")
    more = len(pods) - MAX_PEERS_LISTED
    return ", ".join([*found, *([f"and {more} more"] if more > 0 else [])])


def _clock(time: datetime | None) -> str:
    return "an unknown time" if time is None else time.strftime("%Y-%m-%dT%H:%M:%SZ")
