"""What each way to end costs a TrainJob: which restarts count, which end the job, and when the next pod starts.

The trainers are stand-ins without torch (kit/stand_in.py), and all jobs run at once: each row of `ROWS` is a job. Most
have the runtime reprieve-torch; some show what happens without its failure policy.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.kit import stand_in
from tests.cluster.kit.cluster import Cluster
from tests.cluster.kit.objects import Object, pod_spec, reprieve_runtime, train_job, training_runtime
from tests.cluster.kit.pod_watch import PodState, PodWatch
from tests.cluster.kit.training import apply_train_jobs
from tests.cluster.rig.kubectl import Kubectl, has_condition
from tests.support.launch_kit import processes_with

pytestmark = pytest.mark.timeout(300)

WITHIN_S = 120
MAX_RESTARTS = 1
FINISHES = {"exit": 0, "after_s": 0.5}
STOPS = {"on_sigterm": 143, "after_s": 1}
SAVES = {"on_sigterm": 143, "for_next": True, "after_s": 2}
"""For as long as the Job controller waits before it replaces a failed pod: 10 s."""
EXITS_0 = {"on_sigterm": 0}
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
    jobs.send(signal.SIGKILL, pod)


def terminate(jobs: Jobs, pod: PodState) -> None:
    """SIGTERM to the process alone: Kubernetes does not know of a stop."""
    jobs.send(signal.SIGTERM, pod)


def suspend_and_resume(jobs: Jobs, pod: PodState) -> None:
    name = jobs.folder(pod).name
    jobs.kubectl.patch("trainjob", name, {"spec": {"suspend": True}})
    jobs.pods.wait_for(lambda watch: pod.uid in {each.uid for each in watch.ended()}, f"{name} is suspended")
    jobs.kubectl.patch("trainjob", name, {"spec": {"suspend": False}})


AFTER = "after the old one"
BESIDE = "while the old one still runs"
IN_PLACE = "in the same pod"


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
    starts: int = 2
    """Of the last node."""
    has_policy: bool = True
    """With the failure policy of reprieve-torch; otherwise with that of Trainer's own runtimes, which is none."""
    replaced: str = AFTER
    """When the second start of a node comes."""


ROWS = {
    "exits-143-by-itself-twice": Row(plan=[[{"exit": 143}, {"exit": 143}, FINISHES]], starts=3),
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
    "exits-42": Row(plan=[[{"exit": 42}, FINISHES]], ends="Failed", starts=1),
    "exits-1": Row(plan=[[{"exit": 1}, FINISHES]], counted=1),
    "exits-1-twice": Row(plan=[[{"exit": 1}, {"exit": 1}, FINISHES]], counted=1, ends="Failed"),
    # Why a stopped process must not end with 0: the job is complete, and untrained.
    "evicted-exits-0": Row(plan=[[EXITS_0, FINISHES]], disrupt=evict, starts=1),
    "deleted-exits-0": Row(plan=[[EXITS_0, FINISHES]], disrupt=delete, starts=1),
    "evicted-exits-0-while-its-peer-trains": Row(
        plan=[[{"exit": 0, "after_s": 8}], [EXITS_0, FINISHES]], nodes=2, disrupt=evict, starts=1
    ),
    "signalled-exits-0": Row(plan=[[EXITS_0, FINISHES]], disrupt=terminate, starts=1),
    "signalled-exits-143": Row(plan=[[STOPS, FINISHES]], disrupt=terminate),
    "suspended-exits-0": Row(plan=[[EXITS_0, FINISHES]], disrupt=suspend_and_resume),
    "suspended-exits-143": Row(plan=[[STOPS, FINISHES]], disrupt=suspend_and_resume),
    "suspended-exits-1": Row(plan=[[{"on_sigterm": 1}, FINISHES]], disrupt=suspend_and_resume),
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
    # Why the launcher counts failed starts by itself.
    "crashes-after-its-peer-exits-143": Row(
        plan=[[{"exit": 143, "after_s": 3}, FINISHES], [{"exit": 1, "after_s": 12}, FINISHES]], nodes=2
    ),
    # Why a launcher waits for its predecessor, whatever the runtime.
    "evicted-exits-143-without-the-policy": Row(
        plan=[[SAVES, FINISHES]], disrupt=evict, has_policy=False, replaced=BESIDE
    ),
    "deleted-exits-143-without-the-policy": Row(
        plan=[[SAVES, FINISHES]], disrupt=delete, has_policy=False, replaced=BESIDE
    ),
    "evicted-exits-0-without-the-policy": Row(
        plan=[[{**SAVES, "on_sigterm": 0}, FINISHES]], disrupt=evict, has_policy=False, replaced=BESIDE
    ),
    "signalled-exits-143-without-the-policy": Row(
        plan=[[STOPS, FINISHES]], disrupt=terminate, has_policy=False, replaced=IN_PLACE
    ),
}


@dataclass(frozen=True)
class Jobs:
    """All jobs of the table, in one namespace."""

    kubectl: Kubectl
    pods: PodWatch
    root: Path
    errors: dict[str, Exception] = field(default_factory=dict)
    """What went wrong in the disruption of a job, by its name: the other rows are tested all the same."""

    def folder(self, pod: PodState) -> Path:
        return self.root / pod.pod["metadata"]["labels"]["jobset.sigs.k8s.io/jobset-name"]

    def send(self, number: signal.Signals, pod: PodState) -> None:
        """Send a signal to the only process of a pod."""
        [pid] = processes_with(str(self.folder(pod)))
        os.kill(pid, number)

    def start(self, rows: dict[str, Row]) -> None:
        runtimes, jobs = [], []
        for name, row in rows.items():
            folder = self.root / name
            folder.mkdir()
            spec = pod_spec(container="node", folders=[folder, Path(stand_in.__file__).parent])
            spec["containers"][0] |= row.container
            command = ["python3", stand_in.__file__, str(folder), json.dumps(row.plan)]
            runtimes.append(_runtime(name, row, spec))
            jobs.append(train_job(name, command, runtime=name, nodes=row.nodes))
        self.kubectl.apply(*runtimes)
        apply_train_jobs(self.kubectl, *jobs)

    def disrupt(self, rows: dict[str, Row]) -> None:
        """Disrupt the last pod of each job, as soon as it waits: some of their peers end by themselves soon."""

        def disrupt(name: str, row: Row) -> None:
            try:
                if row.disrupt is not None:
                    row.disrupt(self, self._waiting_pod(name, row.nodes - 1))
            except Exception as error:  # noqa: BLE001 - raised in the test of the row
                self.errors[name] = error

        with ThreadPoolExecutor(len(rows)) as pool:
            list(pool.map(disrupt, rows, rows.values()))

    def _waiting_pod(self, name: str, index: int) -> PodState:
        started = self.root / name / f"starts-{index}"
        found: list[PodState] = []

        def is_waiting(watch: PodWatch) -> bool:
            found[:] = [pod for pod in watch.running() if pod.index == index and self.folder(pod).name == name]
            return bool(found) and started.exists()

        self.pods.wait_for(is_waiting, f"{name} runs", timeout_s=WITHIN_S)
        return found[0]

    def starts(self, name: str, node: int) -> int:
        return len((self.root / name / f"starts-{node}").read_text().splitlines())

    def replaced(self, name: str) -> str:
        """When the later pods of a job have started."""
        pods = [pod for pod in self.pods.latest() if self.folder(pod).name == name]
        if any(pod.restarts for pod in pods):
            return IN_PLACE
        spans = self.pods.spans()
        for index in {pod.index for pod in pods}:
            times = sorted(spans[pod.uid] for pod in pods if pod.index == index and pod.uid in spans)
            if any(later[0] < earlier[1] for earlier, later in itertools.pairwise(times)):
                return BESIDE
        return AFTER

    def end_of(self, name: str) -> tuple[str, int]:
        """The condition that ended a TrainJob, and the restarts that JobSet counted."""
        job = self.kubectl.wait_for("trainjob", name, lambda job: _end(job) is not None, timeout_s=WITHIN_S)
        status = self.kubectl.get("jobset", name).get("status", {})
        return str(_end(job)), int(status.get("restartsCountTowardsMax", 0))


def _runtime(name: str, row: Row, spec: Object) -> Object:
    if row.has_policy:
        return reprieve_runtime(name, spec, grace_period_s=row.grace_period_s, max_restarts=MAX_RESTARTS)
    return training_runtime(name, {**spec, "restartPolicy": "OnFailure"})


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
    if name in jobs.errors:
        raise jobs.errors[name]
    assert jobs.end_of(name) == (row.ends, row.counted), jobs.pods.history()
    assert jobs.starts(name, row.nodes - 1) == row.starts, jobs.pods.history()
    assert jobs.replaced(name) == row.replaced, jobs.pods.history()


def test_a_pod_that_is_deleted_before_it_runs_counts(namespace: Kubectl, pods: PodWatch) -> None:
    runtime = reprieve_runtime("gated", pod_spec(container="node"), max_restarts=MAX_RESTARTS)
    [replicated] = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    replicated["template"]["spec"]["template"]["spec"]["schedulingGates"] = [{"name": "reprieve.dev/gate"}]
    namespace.apply(runtime)
    apply_train_jobs(namespace, train_job("gated", ["true"], runtime="gated"))
    pods.wait_for(lambda watch: len(watch.latest()) == 1, "there is a pod")
    namespace.delete("pod", pods.latest()[0].name, wait=False)
    pods.wait_for(lambda watch: len(watch.latest()) == 2, "there is another one")
    namespace.patch("pod", pods.latest()[1].name, {"spec": {"schedulingGates": None}})
    namespace.wait_for("trainjob", "gated", has_condition("Complete"))
    assert namespace.get("jobset", "gated")["status"]["restartsCountTowardsMax"] == 1
