"""`reconcile(observed) -> writes`: everything that the operator decides about one job, as a pure function.

    stored progress ─► + starts that have ended ─► + what rank 0 reports ─► + state ─► + conditions ─► writes, if any

It may run at any time and any number of times: what is written already is not written again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from reprieve.kubernetes import plain_yaml
from reprieve.kubernetes.jobs.state import JobState
from reprieve.kubernetes.jobs.training_progress import TrainingProgress
from reprieve.kubernetes.kinds import Object
from reprieve.operator.status.conditions import Event, conditions_of, no_progress_message
from reprieve.operator.status.job_state import is_stale, state_of
from reprieve.operator.status.merge import with_report
from reprieve.operator.status.observed import Observed
from reprieve.operator.status.starts import is_without_progress, with_ended_starts


@dataclass(frozen=True, slots=True, kw_only=True)
class Writes:
    """What to write about one job."""

    progress: TrainingProgress | None = None
    """None: it has not changed."""
    events: tuple[Event, ...] = ()
    pause: str = ""
    """Why to pause the job; empty: do not."""
    field: Object | None = None
    """The `spec.checkpointing` that a writer has dropped."""


def reconcile(observed: Observed) -> Writes:
    """Decide what to write."""
    job, before = observed.job, observed.job.progress
    after = with_ended_starts(observed, before)
    report, pod = observed.live_report, observed.rank_zero
    if report is not None and pod is not None and not pod.has_ended:
        after = with_report(after, report, observed.now)
    if pod is not None and pod.restart > (after.restarts or 0):
        after = replace(after, restarts=pod.restart)
    after = _with_state(observed, after)
    conditions, events = conditions_of(observed, before, after)
    after = replace(after, conditions=conditions or None)
    # Not by the record of a pause: it stays when somebody starts the job again without `reprieve resume`.
    stands_still = job.is_suspended or bool(job.end)
    return Writes(
        progress=after if after.to_json() != before.to_json() else None,
        events=tuple(events),
        pause=no_progress_message(after) if is_without_progress(after) and not stands_still else "",
        field=None if job.has_field or job.end else _dropped_field(observed),
    )


def _with_state(observed: Observed, progress: TrainingProgress) -> TrainingProgress:
    state, reason = state_of(observed, progress)
    stale = is_stale(observed, state, progress)
    progress = replace(progress, state=str(state), reason=reason or None, stale=True if stale else None)
    if state in (JobState.RUNNING, JobState.SAVING) and not stale:
        return progress
    # These are only true while the job trains.
    if state != JobState.SUCCEEDED:
        progress = replace(progress, estimated_time_remaining=None, estimated_remaining_seconds=None)
    checkpointing = replace(progress.checkpointing, saving_step=None, saving_percentage=None)
    return replace(progress, samples_per_second=None, tokens_per_second=None, checkpointing=checkpointing)


def _dropped_field(observed: Observed) -> Object:
    """The settings in the form of the field. The annotation, from which they come, also has a version."""
    content = plain_yaml.load(observed.job.settings.to_yaml(), "")
    assert isinstance(content, dict)
    return {name: value for name, value in content.items() if name != "version"}
