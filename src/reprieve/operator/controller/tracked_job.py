"""What the operator knows of one job besides its objects: what rank 0 has answered, and what is due when."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import datetime, timezone

from reprieve.kubernetes.jobs.reports import Report
from reprieve.operator.status.objects import ObservedJob, ObservedPod
from reprieve.operator.status.observed import Observed, newest


@dataclass(slots=True)
class TrackedJob:
    """A job and its pods. Times are those of the monotonic clock."""

    job: ObservedJob | None = None
    """None: only its pods are known yet, or it does not ask for checkpoints."""
    pods: dict[str, ObservedPod] = field(default_factory=dict)
    """By uid. Those of rank 0 that are gone stay until their end is in the status."""
    report: Report | None = None
    reached_at: datetime | None = None
    unreachable: str = ""
    problems: tuple[str, ...] = ()
    """What was wrong with the last report. It is logged once."""
    strangers: set[str] = field(default_factory=set)
    """The uids of pods with the labels of the job that are not its own. Each is logged once."""
    is_changed: bool = False
    is_writing: bool = False
    is_polling: bool = False
    write_after: float = 0.0
    """Not before: the last write failed."""
    failures: int = 0
    """Of writes, in a row."""
    due_at: float = 0.0
    """When to poll rank 0, if it runs; infinity: a poll is under way."""
    check_at: float = 0.0
    """When to decide about the job, though nothing has changed."""

    def take_job(self, job: ObservedJob) -> None:
        if self.job is not None and self.job.uid != job.uid:  # it was deleted, and created again
            self.report, self.reached_at, self.unreachable, self.problems = None, None, "", ()
            self.pods = {uid: pod for uid, pod in self.pods.items() if not pod.is_gone}
        self.job = job
        self.is_changed = True

    def take_pod(self, pod: ObservedPod) -> None:
        known = self.pods.get(pod.uid)
        self.pods[pod.uid] = pod
        self.is_changed = True
        # A pod that starts is polled soon, and so is one that has got SIGTERM: its save may take seconds.
        has_started = pod.is_running and (known is None or not known.is_running)
        is_stopping = pod.deleted_at is not None and (known is None or known.deleted_at is None)
        if pod.rank == 0 and (has_started or is_stopping):
            self.due_at = 0.0

    def lose_pod(self, pod: ObservedPod) -> None:
        """The object no longer exists. How it ended may not be in the status yet."""
        if pod.rank == 0 and self.job is not None:
            self.pods[pod.uid] = replace(pod, gone_at=datetime.now(timezone.utc).replace(microsecond=0))
        else:
            self.pods.pop(pod.uid, None)
        self.strangers.discard(pod.uid)
        self.is_changed = True

    def forget_pods(self) -> None:
        """The ends of all pods that are gone are in the status."""
        self.pods = {uid: pod for uid, pod in self.pods.items() if not pod.is_gone}

    @property
    def rank_zero(self) -> ObservedPod | None:
        """The newest pod of rank 0 that exists."""
        return newest(pod for pod in self.own_pods if pod.rank == 0 and not pod.is_gone)

    @property
    def pod_to_poll(self) -> ObservedPod | None:
        """The running pod of rank 0, of a job that has not ended."""
        pod = self.rank_zero
        if self.job is None or self.job.end or pod is None or pod.why_not_polled:
            return None
        return pod if pod.is_running and pod.address else None

    @property
    def own_pods(self) -> tuple[ObservedPod, ...]:
        job = self.job
        return () if job is None else tuple(pod for pod in self.pods.values() if pod.belongs_to(job))

    def new_strangers(self) -> list[ObservedPod]:
        """The pods that only pretend to be the job's, and were not returned before."""
        job = self.job
        found = [] if job is None else [pod for pod in self.pods.values() if not pod.is_controlled_by(job)]
        new = [pod for pod in found if pod.uid not in self.strangers]
        self.strangers |= {pod.uid for pod in new}
        return new

    def observed(self, now: datetime) -> Observed | None:
        """What a decision is made from; None: there is none to make."""
        if self.job is None:
            return None
        return Observed(
            now=now,
            job=self.job,
            pods=self.own_pods,
            report=self.report,
            reached_at=self.reached_at,
            unreachable=self.unreachable,
        )
