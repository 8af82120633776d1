"""TrainJobs and pods as the API server returns them, what rank 0 answers, and a story of one job for the operator.

story = Story(nodes=2)
story.add_pods(); story.starts(0); story.reports(step=150)
story.reconcile(); assert story.progress["state"] == "Running"
"""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from typing import Any

from reprieve.kubernetes.jobs.reports import Report, from_answer
from reprieve.operator.status.conditions import Event
from reprieve.operator.status.objects import ObservedPod, job_of, pod_of
from reprieve.operator.status.observed import Observed
from reprieve.operator.status.reconcile import Writes, reconcile

Object = dict[str, Any]

BEGAN = datetime(2026, 11, 19, 5, 0, 0, tzinfo=timezone.utc)
SETTINGS = "version: 1\nstorage:\n  uri: /c\n  persistentVolume:\n    claimName: claim\n    mountPath: /c\n"
JOB_SET_UID = "jobset-uid"


def stamp(at: datetime) -> str:
    return at.strftime("%Y-%m-%dT%H:%M:%SZ")


def train_job_object(name: str = "train", *, nodes: int = 1, settings: str = SETTINGS, **spec: Any) -> Object:
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {
            "name": name,
            "namespace": "team",
            "uid": f"{name}-uid",
            "resourceVersion": "1",
            "annotations": {"reprieve.dev/checkpointing": settings},
        },
        "spec": {"trainer": {"numNodes": nodes}, "checkpointing": {"storage": {"uri": "/c"}}, **spec},
    }


def pod_object(name: str, *, rank: int = 0, job: str = "train", created: datetime = BEGAN, restart: int = 0) -> Object:
    """A pod that waits for a node."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": "team",
            "uid": f"{name}-uid",
            "resourceVersion": "1",
            "creationTimestamp": stamp(created),
            "ownerReferences": [
                {"apiVersion": "batch/v1", "kind": "Job", "name": f"{job}-node-0", "uid": "job-uid", "controller": True}
            ],
            "labels": {
                "jobset.sigs.k8s.io/jobset-name": job,
                "jobset.sigs.k8s.io/jobset-uid": JOB_SET_UID,
                "jobset.sigs.k8s.io/job-index": "0",
                "jobset.sigs.k8s.io/replicatedjob-name": "node",
                "jobset.sigs.k8s.io/restart-attempt": str(restart),
                "batch.kubernetes.io/job-completion-index": str(rank),
            },
        },
        "spec": {"containers": [{"name": "node", "env": []}]},
        "status": {"phase": "Pending"},
    }


def answer(**changes: Any) -> Object:
    """What `/trainingProgress` answers in the middle of a training. `checkpointing` is merged."""
    found: Object = {
        "epoch": 1,
        "totalEpochs": 3,
        "step": 150,
        "totalSteps": 300,
        "loss": "0.4523",
        "learningRate": "0.000050",
        "percentComplete": "50.0",
        "estimatedTimeRemaining": "45m",
        "lastUpdateTime": stamp(BEGAN),
        "state": "training",
        "reason": None,
        "saved": None,
        "currentEpoch": "1.50",
        "estimatedRemainingSeconds": 2700,
        "accuracy": "0.8756",
        "validationLoss": "0.5123",
        "validationAccuracy": "0.8234",
        "gradientNorm": "1.2000",
        "samplesPerSecond": "12.00",
        "tokensPerSecond": None,
        "resumedFrom": None,
        "resumedFromStep": None,
        "restarts": 0,
        "run": "jobset-uid",
        "checkpointing": {
            "enabled": True,
            "latestCheckpoint": "/c/checkpoint-100",
            "checkpointsCreated": 2,
            "latestCheckpointTime": stamp(BEGAN),
            "latestCheckpointBytes": 1000,
            "checkpointsValid": 2,
            "savingStep": None,
            "savingPercentage": None,
            "lastSaveDuration": "2.13s",
            "availableCheckpoints": [
                {
                    "path": "/c/checkpoint-100",
                    "step": 100,
                    "created": stamp(BEGAN),
                    "bytes": 1000,
                    "valid": True,
                    "reason": None,
                }
            ],
            **changes.pop("checkpointing", {}),
        },
    }
    return {**found, **changes}


def termination_message(**changes: Any) -> str:
    """What a stopped rank 0 leaves behind, with the launcher's last line. `checkpointing` is merged."""
    found: Object = {
        "progressPercentage": 50,
        "estimatedRemainingSeconds": 2700,
        "currentStep": 150,
        "totalSteps": 300,
        "currentEpoch": 1.5,
        "totalEpochs": 3,
        "trainMetrics": {"loss": 0.4523, "learning_rate": 5e-05},
        "evalMetrics": {"eval_loss": 0.5},
        "state": "stopped",
        "reason": "SIGTERM",
        "saved": True,
        "samplesPerSecond": None,
        "tokensPerSecond": None,
        "resumedFrom": None,
        "resumedFromStep": None,
        "restarts": 0,
        "lastUpdateTime": stamp(BEGAN),
        "checkpointing": {
            "enabled": True,
            "latestCheckpoint": "/c/checkpoint-150",
            "checkpointsCreated": 3,
            "latestCheckpointTime": stamp(BEGAN),
            "lastSaveDuration": "2.13s",
            **changes.pop("checkpointing", {}),
        },
        "step": 150,
        "message": "stopped by SIGTERM: saved at step 150. The next start resumes from there",
    }
    return json.dumps({**found, **changes})


@dataclass
class Story:
    """One job over time. What the operator writes is stored, as the API server would."""

    nodes: int = 1
    settings: str = SETTINGS
    now: datetime = BEGAN
    job: Object = field(init=False)
    pods: dict[int, Object] = field(default_factory=dict)
    """The pods of the current start, by rank."""
    former: list[ObservedPod] = field(default_factory=list)
    """Pods that are gone."""
    report: Report | None = None
    reached_at: datetime | None = None
    unreachable: str = ""
    events: list[Event] = field(default_factory=list)
    starts_so_far: int = 0

    def __post_init__(self) -> None:
        self.job = train_job_object(nodes=self.nodes, settings=self.settings)

    @property
    def progress(self) -> Object:
        """What is stored."""
        return dict(self.job.get("status", {}).get("trainingProgress", {}))

    @property
    def reasons(self) -> list[str]:
        """Of all Events."""
        return [each.reason for each in self.events]

    def condition(self, kind: str) -> Object:
        return next((each for each in self.progress.get("conditions", []) if each["type"] == kind), {})

    def after(self, seconds: float) -> None:
        self.now += timedelta(seconds=seconds)

    def add_pods(self) -> None:
        """JobSet creates the pods of the next start."""
        for rank in range(self.nodes):
            name = f"train-node-0-{rank}-{self.starts_so_far}"
            self.pods[rank] = pod_object(name, rank=rank, created=self.now, restart=self.starts_so_far)
        self.starts_so_far += 1

    def schedule(self, rank: int = 0) -> None:
        """The pod gets a node, and waits there for its volumes."""
        pod = self.pods[rank]
        pod["spec"]["nodeName"] = f"node-{rank}"
        scheduled = {"type": "PodScheduled", "status": "True", "lastTransitionTime": stamp(self.now)}
        pod["status"]["conditions"] = [scheduled]

    def starts(self, *ranks: int) -> None:
        for rank in ranks:
            pod = self.pods[rank]
            pod["spec"]["nodeName"] = f"node-{rank}"
            container = {"name": "node", "state": {"running": {"startedAt": stamp(self.now)}}}
            conditions = [{"type": "PodReadyToStartContainers", "status": "True"}]
            pod["status"] = {
                "phase": "Running",
                "podIP": "10.0.0.1",
                "conditions": conditions,
                "containerStatuses": [container],
            }

    def delete(self, rank: int = 0, *, grace_s: float = 30, disruption: str = "") -> None:
        """The pod gets SIGTERM."""
        pod = self.pods[rank]
        pod["metadata"]["deletionTimestamp"] = stamp(self.now + timedelta(seconds=grace_s))
        if disruption:
            pod["status"]["conditions"].append({"type": "DisruptionTarget", "status": "True", "reason": disruption})

    def end(self, exit_code: int, message: str = "", *, reason: str = "Error") -> None:
        """The containers of all ranks end."""
        for pod in self.pods.values():
            ended = {
                "exitCode": exit_code,
                "reason": reason,
                "message": message,
                "startedAt": stamp(BEGAN),
                "finishedAt": stamp(self.now),
            }
            pod["status"] = {
                **pod["status"],
                "phase": "Failed",
                "containerStatuses": [{"name": "node", "state": {"terminated": ended}}],
            }

    def remove_pods(self) -> None:
        """The pods' objects are deleted."""
        from dataclasses import replace

        found = [pod_of(pod) for pod in self.pods.values()]
        self.former += [replace(pod, gone_at=self.now) for pod in found if pod is not None]
        self.pods = {}

    def reports(self, **changes: Any) -> None:
        """Rank 0 answers."""
        content = answer(**{"lastUpdateTime": stamp(self.now), **changes})
        self.report = from_answer(json.dumps(content).encode(), self.pods[0]["metadata"]["name"], self.now)
        self.reached_at, self.unreachable = self.now, ""

    def observed(self) -> Observed:
        job = job_of(copy.deepcopy(self.job))
        assert job is not None
        pods = [pod_of(pod) for pod in self.pods.values()]
        return Observed(
            now=self.now,
            job=job,
            pods=(*self.former, *(pod for pod in pods if pod is not None)),
            report=self.report,
            reached_at=self.reached_at,
            unreachable=self.unreachable,
        )

    def reconcile(self) -> Writes:
        """Decide, and store what is to be written."""
        writes = reconcile(self.observed())
        if writes.progress is not None:
            self.job.setdefault("status", {})["trainingProgress"] = writes.progress.to_json()
        self.events += writes.events
        again = reconcile(self.observed())
        assert (again.progress, again.events) == (None, ()), "what is written is not written again"
        return writes

    def train_to(self, step: int, **changes: Any) -> None:
        """A new start trains to this step."""
        self.add_pods()
        self.reconcile()
        self.after(2)
        self.starts(*range(self.nodes))
        self.reconcile()
        self.after(2)
        self.reports(step=step, **changes)
        self.reconcile()
