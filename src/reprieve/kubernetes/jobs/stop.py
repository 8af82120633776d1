"""Waits until the pods of a suspended job have stopped, and sees how rank 0 ended.

A pod's object is gone 0.3 s after it ends, with its exit code and its termination message. So the watch begins before
the job is suspended, and continues from the last change that it has seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from reprieve.clock import Clock
from reprieve.errors import KubernetesError
from reprieve.kubernetes import pausing
from reprieve.kubernetes.jobs.cluster import Cluster
from reprieve.kubernetes.jobs.pods import Pod, pods_of, rank_zero
from reprieve.kubernetes.jobs.reader import JobReader
from reprieve.kubernetes.kinds import POD, Event, Object
from reprieve.kubernetes.names import JOB_SET_LABEL

POLL_S = 0.5
WATCH_S = 5
"""After so long the job is read again: Kueue may have started pods after the pause was requested."""
MAX_PODS_LISTED = 3


class WaitTimeout(KubernetesError):
    """What was waited for did not happen in time. The message says what the job is doing."""


class StopWatch:
    """The pods of one job, from before it is suspended."""

    def __init__(self, cluster: Cluster, reader: JobReader, name: str, clock: Clock) -> None:
        self._cluster, self._reader, self._name, self._clock = cluster, reader, name, clock
        self._labels = {JOB_SET_LABEL: name}
        self._version = ""
        self._pods: dict[str, Object] = {}
        """Those that exist, by uid."""
        self._last: dict[str, Object] = {}
        """Each pod that was seen, as it was last."""
        self._list()

    @property
    def grace(self) -> timedelta:
        """The longest grace period of the pods."""
        return timedelta(seconds=max((Pod(pod).grace_s for pod in self._pods.values()), default=0))

    def wait(self, timeout: timedelta) -> Pod | None:
        """Wait until no pod runs, and return rank 0's last one; None: there was none."""
        deadline = self._clock.monotonic() + timeout.total_seconds()
        while True:
            job = self._reader.job(self._name)
            if pausing.is_suspended(job) and not self._unfinished(job):
                self._list()
                if not self._unfinished(job):
                    return rank_zero(pods_of(job, list(self._last.values())))
            if self._clock.monotonic() >= deadline:
                running = self._unfinished(job)
                names = ", ".join(running[:MAX_PODS_LISTED]) + (", …" if len(running) > MAX_PODS_LISTED else "")
                raise WaitTimeout(
                    f"{self._name} has not stopped after {timeout.total_seconds():.0f} s: "
                    + (f"{names} still run. The job remains paused" if running else "it is not suspended yet")
                )
            self._follow(job, deadline)

    def _follow(self, job: Object, deadline: float) -> None:
        """Take in changes, until the last pod has ended or the job is to be read again."""
        if not self._unfinished(job):
            self._clock.sleep(POLL_S)
        seconds = max(1, min(WATCH_S, round(deadline - self._clock.monotonic())))
        try:
            for event in self._cluster.watch(POD, resource_version=self._version, labels=self._labels, seconds=seconds):
                self._take(event)
                if not self._unfinished(job):
                    return
        except KubernetesError:  # the version is too old, or the API server was away
            self._clock.sleep(POLL_S)
            self._list()

    def _take(self, event: Event) -> None:
        uid = event.object["metadata"]["uid"]
        self._version = event.object["metadata"]["resourceVersion"]
        self._last[uid] = event.object
        if event.type == "DELETED":
            self._pods.pop(uid, None)
        else:
            self._pods[uid] = event.object

    def _list(self) -> None:
        pods, self._version = self._cluster.list(POD, labels=self._labels)
        self._pods = {pod["metadata"]["uid"]: pod for pod in pods}
        self._last |= self._pods

    def _unfinished(self, job: Object) -> Sequence[str]:
        return pausing.unfinished_pods(job, self._pods.values())
