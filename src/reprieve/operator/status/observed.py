"""Everything that a decision about one TrainJob is made from."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from reprieve.kubernetes.jobs.reports import Report
from reprieve.operator.status.objects import ObservedJob, ObservedPod

_UNAVAILABLE = re.compile(r"nodes are available: (?P<reasons>[^.]*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """A job, its pods, and what rank 0 has reported, as known at one time."""

    now: datetime
    job: ObservedJob
    pods: tuple[ObservedPod, ...] = ()
    """Of the job's JobSet. Those that are gone stay until their end is in the status."""
    report: Report | None = None
    """The last one."""
    reached_at: datetime | None = None
    """When rank 0 answered last."""
    unreachable: str = ""
    """Why it does not answer now."""

    @property
    def rank_zero(self) -> ObservedPod | None:
        """The newest pod of rank 0 that exists."""
        return newest(pod for pod in self.pods if pod.rank == 0 and not pod.is_gone)

    @property
    def live_report(self) -> Report | None:
        """What the running pod of rank 0 has reported."""
        pod = self.rank_zero
        return self.report if pod is not None and self.report is not None and self.report.pod == pod.name else None

    @property
    def peers(self) -> dict[int, ObservedPod | None]:
        """The newest pod of each other rank; None: it has none."""
        found = [pod for pod in self.pods if not pod.is_gone]
        nodes = max([self.job.nodes, *(pod.rank + 1 for pod in found)])
        return {rank: newest(pod for pod in found if pod.rank == rank) for rank in range(1, nodes)}


def newest(pods: Iterable[ObservedPod]) -> ObservedPod | None:
    return max(pods, key=lambda pod: (pod.created is not None and pod.created.timestamp(), pod.name), default=None)


def why_it_waits(pod: ObservedPod) -> str:
    """Return why a pod does not run yet: `Insufficient cpu`, `ContainerCreating`; empty: not known."""
    if pod.unscheduled:
        found = _UNAVAILABLE.search(pod.unscheduled)
        reasons = found["reasons"].split(",") if found else [pod.unscheduled]
        return ", ".join(re.sub(r"^\s*\d+ ", "", reason).strip() for reason in reasons)
    if pod.container.waiting_message:
        return f"{pod.container.waiting}: {pod.container.waiting_message}"
    return pod.container.waiting
