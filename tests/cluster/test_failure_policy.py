"""What each way to end costs a TrainJob with the runtime reprieve-torch: which restarts count, and which end the job.

The trainers are stand-ins without torch (kit/stand_in.py), and all jobs run at once: each row of `ROWS` is a job.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.kit import stand_in
from tests.cluster.kit.cluster import Cluster
from tests.cluster.kit.objects import Object, pod_spec, reprieve_runtime, train_job
from tests.cluster.kit.pod_watch import PodState, PodWatch
from tests.cluster.rig.kubectl import Kubectl
from tests.support.launch_kit import processes_with

pytestmark = pytest.mark.timeout(300)

WITHIN_S = 120
MAX_RESTARTS = 1
FINISHES = {"exit": 0, "after_s": 0.5}
STOPS = {"on_sigterm": 143, "after_s": 1}
IGNORES = {"on_sigterm": None}
SHORT_GRACE_S = 3


def evict(jobs: Jobs, pod: PodState) -> None:
    jobs.kubectl.evict(pod.name)


def delete(jobs: Jobs, pod: PodState) -> None:
    jobs.kubectl.delete("pod", pod.name, wait=False)


def force_delete(jobs: Jobs, pod: PodState) -> None:
    jobs.kubectl.delete("pod", pod.name, "--force", "--grace-period=0", wait=False)


def kill(jobs: Jobs, pod: PodState) -> None:
    """SIGKILL from outside of the container, as the kernel or a node's agent would send it."""
    [pid] = processes_with(str(jobs.folder(pod)))
    os.kill(pid, signal.SIGKILL)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One way in which the pods of a job end."""

    plan: list[list[dict[str, Any]]]
    """What each node does at each start; further nodes do as the last one."""
    nodes: int = 1
    disrupt: Callable[[Jobs, PodState], None] | None = None
    """What happens to the pod of the last node at its first start."""
    counted: int = 0
    """Against maxRestarts."""
    ends: str = "Complete"
    container: Object = field(default_factory=dict)
    """Further fields of it."""
    grace_period_s: int = 30


ROWS = {
    "exits-143-by-itself-twice": Row(plan=[[{"exit": 143}, {"exit": 143}, FINISHES]]),
    "evicted-exits-143": Row(plan=[[STOPS, FINISHES]], disrupt=evict),
    "evicted-killed-at-the-end-of-its-grace-period": Row(
        plan=[[IGNORES, FINISHES]], disrupt=evict, grace_period_s=SHORT_GRACE_S
    ),
    "deleted-exits-143": Row(plan=[[STOPS, FINISHES]], disrupt=delete),
    "deleted-killed-at-the-end-of-its-grace-period": Row(
        plan=[[IGNORES, FINISHES]], disrupt=delete, grace_period_s=SHORT_GRACE_S, counted=1
    ),
    "deleted-by-force": Row(plan=[[IGNORES, FINISHES]], disrupt=force_delete, counted=1),
    "killed": Row(plan=[[STOPS, FINISHES]], disrupt=kill, counted=1),
    "out-of-memory": Row(
        plan=[[{"allocate_mib": 512}, FINISHES]], container={"resources": {"limits": {"memory": "64Mi"}}}, counted=1
    ),
    "exits-42": Row(plan=[[{"exit": 42}, FINISHES]], ends="Failed"),
    "exits-1": Row(plan=[[{"exit": 1}, FINISHES]], counted=1),
    "exits-1-twice": Row(plan=[[{"exit": 1}, {"exit": 1}, FINISHES]], counted=1, ends="Failed"),
    # Why a stopped process must not end with 0: the job is complete, and untrained.
    "evicted-exits-0": Row(plan=[[{"on_sigterm": 0}, {"exit": 1}]], disrupt=evict),
    # As torchrun does without `reprieve run`.
    "deleted-exits-1": Row(plan=[[{"on_sigterm": 1}, FINISHES]], disrupt=delete, counted=1),
    # Why all ranks must end with 143 while a stop is under way.
    "evicted-and-saving-while-its-peer-fails": Row(
        plan=[[{"exit": 1, "after_s": 6}, FINISHES], [{"on_sigterm": 143, "after_s": 20}, FINISHES]],
        nodes=2,
        disrupt=evict,
        counted=1,
    ),
    "one-node-is-evicted-and-both-exit-143": Row(
        plan=[[{"exit": 143, "after_s": 8}, FINISHES], [STOPS, FINISHES]], nodes=2, disrupt=evict
    ),
}


@dataclass(frozen=True)
class Jobs:
    """All jobs of the table, in one namespace."""

    kubectl: Kubectl
    pods: PodWatch
    root: Path

    def folder(self, pod: PodState) -> Path:
        return self.root / pod.pod["metadata"]["labels"]["jobset.sigs.k8s.io/jobset-name"]

    def start(self, rows: dict[str, Row]) -> None:
        runtimes, jobs = [], []
        for name, row in rows.items():
            folder = self.root / name
            folder.mkdir()
            spec = pod_spec(container="node", folders=[folder, Path(stand_in.__file__).parent])
            spec["containers"][0] |= row.container
            command = ["python3", stand_in.__file__, str(folder), json.dumps(row.plan)]
            runtimes.append(reprieve_runtime(name, spec, grace_period_s=row.grace_period_s, max_restarts=MAX_RESTARTS))
            jobs.append(train_job(name, command, runtime=name, nodes=row.nodes))
        self.kubectl.apply(*runtimes)
        time.sleep(1)  # until Trainer's webhook, which refuses a job without a runtime, has seen them
        self.kubectl.apply(*jobs)

    def disrupt(self, rows: dict[str, Row]) -> None:
        """Disrupt the last pod of each job, as soon as it waits."""
        for name, row in rows.items():
            if row.disrupt is not None:
                row.disrupt(self, self._waiting_pod(name, row.nodes - 1))

    def _waiting_pod(self, name: str, index: int) -> PodState:
        started = self.root / name / f"starts-{index}"
        found: list[PodState] = []

        def is_waiting(watch: PodWatch) -> bool:
            found[:] = [pod for pod in watch.running() if pod.index == index and self.folder(pod).name == name]
            return bool(found) and started.exists()

        self.pods.wait_for(is_waiting, f"{name} runs", timeout_s=WITHIN_S)
        time.sleep(0.3)  # from its first line until it waits for SIGTERM
        return found[0]

    def end_of(self, name: str) -> tuple[str, int]:
        """The condition that ended a TrainJob, and the restarts that JobSet counted."""
        job = self.kubectl.wait_for("trainjob", name, lambda job: _end(job) is not None, timeout_s=WITHIN_S)
        status = self.kubectl.get("jobset", name).get("status", {})
        return str(_end(job)), int(status.get("restartsCountTowardsMax", 0))


def _end(job: Object) -> str | None:
    conditions = job.get("status", {}).get("conditions", [])
    return next((each["type"] for each in conditions if each["status"] == "True" and each["type"] != "Suspended"), None)


@pytest.fixture(scope="module")
def jobs(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jobs]:
    """All jobs, started and disrupted."""
    name = f"failure-policy-{os.getpid()}"
    cluster.kubectl.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
    kubectl = cluster.kubectl.for_namespace(name)
    kubectl.wait_for("serviceaccount", "default", lambda _: True)
    with PodWatch(kubectl) as pods:
        jobs = Jobs(kubectl, pods, tmp_path_factory.mktemp("jobs"))
        jobs.start(ROWS)
        jobs.disrupt(ROWS)
        yield jobs
    cluster.kubectl.delete("namespace", name, wait=False)


@pytest.mark.parametrize("name", ROWS)
def test_what_an_end_costs(jobs: Jobs, name: str) -> None:
    row = ROWS[name]
    assert jobs.end_of(name) == (row.ends, row.counted), jobs.pods.history()
