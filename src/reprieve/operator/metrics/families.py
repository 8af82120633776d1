"""The operator's metrics in Prometheus' text format. docs/operator.md describes each; the chart's alerts use them.

What a job reports comes from its status, as the operator has written it: a value that is unknown is left out.
"""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from reprieve.kubernetes.jobs.training_progress import finite
from reprieve.operator.metrics.counters import Counters
from reprieve.operator.status.conditions import interval_of
from reprieve.operator.status.objects import ObservedJob, ObservedPod
from reprieve.progress.formats.prometheus import COUNTER, GAUGE, family, labels

Job = tuple[ObservedJob, ObservedPod | None]
"""A job with its pod of rank 0."""


COUNTERS = {
    "polls": "Requests to rank 0 of jobs, by what came of them.",
    "writes": "Writes to the API server, by what was written.",
    "watch_restarts": "How often all objects of a kind were listed again.",
}


@dataclass(frozen=True, slots=True)
class JobMetric:
    """One value of each job."""

    name: str
    kind: str
    text: str
    read: Callable[[ObservedJob, ObservedPod | None], float | None]


JOB_METRICS = (
    JobMetric("step", GAUGE, "Completed optimizer steps.", lambda job, _: job.progress.step),
    JobMetric("total_steps", GAUGE, "Optimizer steps of the whole run.", lambda job, _: job.progress.total_steps),
    JobMetric("progress_percent", GAUGE, "Completed share of the run.", lambda job, _: job.progress.percent),
    JobMetric("loss", GAUGE, "Training loss.", lambda job, _: _finite(job.progress.loss)),
    JobMetric(
        "remaining_seconds",
        GAUGE,
        "Estimated time until the run is finished.",
        lambda job, _: job.progress.estimated_remaining_seconds,
    ),
    JobMetric(
        "last_update_timestamp_seconds",
        GAUGE,
        "When training last reported anything.",
        lambda job, _: _timestamp(job.progress.last_update_time),
    ),
    JobMetric(
        "running_since_timestamp_seconds",
        GAUGE,
        "When rank 0 started; only while it runs.",
        lambda _, pod: None if pod is None or not pod.is_running else _timestamp(pod.container.started),
    ),
    JobMetric(
        "last_checkpoint_timestamp_seconds",
        GAUGE,
        "When the newest checkpoint became durable.",
        lambda job, _: _timestamp(job.progress.checkpointing.latest_checkpoint_time),
    ),
    JobMetric(
        "checkpoint_interval_seconds",
        GAUGE,
        "How often the job wants a checkpoint; left out if not by time.",
        lambda job, _: None if (interval := interval_of(job.settings)) is None else interval.total_seconds(),
    ),
    JobMetric(
        "last_save_seconds",
        GAUGE,
        "How long the last save took.",
        lambda job, _: job.progress.checkpointing.last_save_seconds,
    ),
    JobMetric(
        "grace_period_seconds",
        GAUGE,
        "From SIGTERM to SIGKILL, of the pod of rank 0.",
        lambda _, pod: None if pod is None else pod.grace.total_seconds(),
    ),
    JobMetric("restarts_total", COUNTER, "How often the job was restarted.", lambda job, _: job.progress.restarts),
    JobMetric(
        "starts_without_progress",
        GAUGE,
        "Starts in a row that saved no new step. At five the job is paused.",
        lambda job, _: job.progress.starts_without_progress or 0,
    ),
    JobMetric(
        "checkpoints_created_total",
        COUNTER,
        "Checkpoints that became durable.",
        lambda job, _: job.progress.checkpointing.checkpoints_created,
    ),
)


def of_jobs(jobs: Iterable[Job]) -> Iterator[str]:
    """Yield the lines about jobs. Only the leader knows them."""
    known = sorted(jobs, key=lambda found: (found[0].namespace, found[0].name))
    for metric in JOB_METRICS:
        found = {_labels(job): metric.read(job, pod) for job, pod in known}
        samples = {each: float(value) for each, value in found.items() if value is not None}
        yield from family(f"reprieve_trainjob_{metric.name}", metric.kind, metric.text, samples)
    states = {_labels(job, state=job.progress.state): 1.0 for job, _ in known if job.progress.state}
    yield from family("reprieve_trainjob_info", GAUGE, "1, with the state of the job.", states)
    conditions = {
        _labels(job, condition=each.type): float(each.holds)
        for job, _ in known
        for each in job.progress.conditions or ()
    }
    yield from family("reprieve_trainjob_condition", GAUGE, "1 while the condition holds, then 0.", conditions)


def of_operator(counters: Counters, *, is_leader: bool, objects: Mapping[str, int]) -> Iterator[str]:
    """Yield the lines about this replica. `objects`: how many it observes, by kind."""
    yield from family(
        "reprieve_operator_is_leader", GAUGE, "1 in the replica that writes status.", {"": float(is_leader)}
    )
    observed = {labels(kind=kind): float(count) for kind, count in objects.items()}
    yield from family("reprieve_operator_objects", GAUGE, "Objects that are observed.", observed)
    for name, text in COUNTERS.items():
        samples = {labels(**dict(key)): float(count) for key, count in counters.of(name).items()}
        yield from family(f"reprieve_operator_{name}_total", COUNTER, text, samples)
    usage = resource.getrusage(resource.RUSAGE_SELF)
    yield from family("process_cpu_seconds_total", COUNTER, "CPU time.", {"": usage.ru_utime + usage.ru_stime})
    if (memory := _resident_bytes()) is not None:
        yield from family("process_resident_memory_bytes", GAUGE, "Resident memory.", {"": float(memory)})


def _labels(job: ObservedJob, **more: str) -> str:
    return labels(namespace=job.namespace, trainjob=job.name, **more)


def _finite(text: str | None) -> float | None:
    return None if text is None else finite(text)


def _timestamp(at: datetime | None) -> float | None:
    return None if at is None else at.timestamp()


def _resident_bytes() -> int | None:
    """Now; None: not Linux."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    except OSError:
        return None
