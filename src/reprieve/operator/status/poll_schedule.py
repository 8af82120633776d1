"""How often the operator requests the progress of a job from rank 0: often where much changes, seldom elsewhere."""

from __future__ import annotations

from datetime import datetime, timedelta

from reprieve.kubernetes.jobs.training_progress import TrainingProgress
from reprieve.operator.status.conditions import interval_of
from reprieve.operator.status.objects import ObservedJob

SHORT, FRESH, LONG = timedelta(seconds=15), timedelta(seconds=30), timedelta(seconds=60)
STOPPING = timedelta(seconds=5)
"""While a pod has been deleted: its save may take seconds only."""
FRESH_WITHIN, OLD_AFTER = timedelta(minutes=1), timedelta(minutes=5)
FIRST_PERCENT = 10.0
JITTER = 0.1
"""The share by which an interval varies: jobs that were created together are not polled together."""


def poll_interval(
    job: ObservedJob, reported: TrainingProgress, now: datetime, *, is_stopping: bool, random: float
) -> timedelta:
    """Return how long to wait until the next poll. `reported`: by the pod that is polled. `random`: from 0 to 1.

    Not by the stored progress: that of this poll is not written yet, and what is stored is as old as the last poll.
    """
    if is_stopping:
        return STOPPING
    return _interval(job, reported, now) * (1 + JITTER * (2 * random - 1))


def _interval(job: ObservedJob, reported: TrainingProgress, now: datetime) -> timedelta:
    if job.poll_interval is not None:
        return job.poll_interval
    updated, percent = reported.last_update_time, reported.percent
    if updated is None or (percent is not None and percent < FIRST_PERCENT):
        return SHORT
    age = now - updated
    if age < FRESH_WITHIN:
        return FRESH
    if age > OLD_AFTER:
        return LONG
    interval = interval_of(job.settings)
    return LONG if interval is None else min(max(interval / 2, SHORT), LONG)
