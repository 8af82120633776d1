"""Reads TrainJobs with what belongs to them: pods, Kueue's Workload, and what rank 0 reports.

What a user may not read besides the job itself is left out: pods, Workloads and `pods/proxy` are permissions of their
own, and a job with an operator needs none of them.
"""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

from reprieve.clock import Clock
from reprieve.errors import KubernetesError, NotPermitted, ObjectNotFound
from reprieve.kubernetes import pausing
from reprieve.kubernetes.jobs import reports
from reprieve.kubernetes.jobs.cluster import Cluster
from reprieve.kubernetes.jobs.job_view import JobView, stored_progress, view_of
from reprieve.kubernetes.jobs.pods import Pod, pods_of, rank_zero
from reprieve.kubernetes.jobs.reports import NoReport, Report
from reprieve.kubernetes.kinds import EARLIER_WORKLOAD, POD, TRAIN_JOB, WORKLOAD, Object
from reprieve.kubernetes.names import JOB_SET_LABEL
from reprieve.kubernetes.pausing import QUEUE_LABEL

MAX_NEAR = 3
MOST_POLLED = 20
"""Pods whose progress is requested for a list of jobs, where there is no operator."""
PROGRESS_PATH = "/trainingProgress"


class JobNotFound(ObjectNotFound):
    """There is no such TrainJob. The message names those with similar names."""


class JobReader:
    """Reads the jobs of one namespace."""

    def __init__(self, cluster: Cluster, clock: Clock) -> None:
        self._cluster = cluster
        self._clock = clock

    def now(self) -> datetime:
        return datetime.fromtimestamp(self._clock.time(), timezone.utc)

    def job(self, name: str) -> Object:
        """JobNotFound: there is none with this name."""
        try:
            return self._cluster.get(TRAIN_JOB, name)
        except ObjectNotFound as error:
            raise self._not_found(name) from error

    def workload(self, job: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Return Kueue's Workload of a job; None: there is none, or no Kueue. NotPermitted: the job is in a queue, and
        this user may not read its Workload."""
        try:
            return pausing.workload_of(job, self._workloads())
        except NotPermitted:
            # Without Kueue, the API server refuses those who may not list Workloads before it notices.
            if QUEUE_LABEL in (job["metadata"].get("labels") or {}):
                raise
            return None

    def view(self, name: str) -> JobView:
        job = self.job(name)
        return self._view(job, self._workloads_or_none(), self._pods(job["metadata"]["name"]), asks_pod=True)

    def views(self) -> list[JobView]:
        """Return all jobs, newest first."""
        try:
            jobs, _ = self._cluster.list(TRAIN_JOB)
        except ObjectNotFound as error:
            raise _no_trainer() from error
        jobs.sort(key=lambda job: str(job["metadata"].get("creationTimestamp", "")), reverse=True)
        workloads, pods = self._workloads_or_none(), self._pods() if jobs else []
        return [self._view(job, workloads, pods, asks_pod=number < MOST_POLLED) for number, job in enumerate(jobs)]

    def _view(
        self,
        job: Mapping[str, Any],
        workloads: Sequence[Mapping[str, Any]],
        pods: Sequence[Mapping[str, Any]],
        *,
        asks_pod: bool,
    ) -> JobView:
        report = None
        if stored_progress(job) is None:
            report = self._report(rank_zero(pods_of(job, pods)), asks_pod=asks_pod)
        return view_of(job, pausing.workload_of(job, workloads), pods, now=self.now(), report=report)

    def _report(self, pod: Pod | None, *, asks_pod: bool) -> Report | None:
        """Return what rank 0 reports itself, if it can be had."""
        if pod is None:
            return None
        if pod.is_running and asks_pod:
            with contextlib.suppress(NoReport, KubernetesError):
                body = self._cluster.get_from_pod(pod.name, pod.metrics_port, PROGRESS_PATH)
                return reports.from_answer(body, pod.name, self.now())
        return report_of(pod, self.now())

    def _pods(self, job: str | None = None) -> list[Object]:
        with contextlib.suppress(NotPermitted):
            return self._cluster.list(POD, labels=None if job is None else {JOB_SET_LABEL: job})[0]
        return []

    def _workloads_or_none(self) -> list[Object]:
        with contextlib.suppress(NotPermitted):
            return self._workloads()
        return []

    def _workloads(self) -> list[Object]:
        for kind in (WORKLOAD, EARLIER_WORKLOAD):
            with contextlib.suppress(ObjectNotFound):
                return self._cluster.list(kind)[0]
        return []

    def _not_found(self, name: str) -> KubernetesError:
        try:
            jobs, _ = self._cluster.list(TRAIN_JOB)
        except ObjectNotFound:
            return _no_trainer()
        except KubernetesError:
            jobs = []
        names = [str(job["metadata"]["name"]) for job in jobs]
        near = difflib.get_close_matches(name, names, n=MAX_NEAR, cutoff=0.5)
        where = f"there is no TrainJob {name} in namespace {self._cluster.namespace}"
        if near:
            return JobNotFound(f"{where}: did you mean {' or '.join(near)}?")
        if names:
            more = f" and {len(names) - MAX_NEAR} more" if len(names) > MAX_NEAR else ""
            return JobNotFound(f"{where}: there are {', '.join(sorted(names)[:MAX_NEAR])}{more}")
        return JobNotFound(f"{where}: it has none; name another one with --namespace")


def report_of(pod: Pod, now: datetime) -> Report | None:
    """Return what a pod that has ended has left in its termination message."""
    with contextlib.suppress(NoReport):
        return reports.from_termination_message(pod.termination_message, pod.name, now)
    return None


def _no_trainer() -> KubernetesError:
    return ObjectNotFound("the cluster has no TrainJobs: install Kubeflow Trainer 2.3")
