"""A TrainJob that trains with torch on two nodes, one rank each, and what its ranks wrote to a folder of the machine.

The script is tests/support/jobs/launch_job.py, started as users start theirs: `reprieve run torchrun script`. A
*generation* is one start of the job: its two pods.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from tests.cluster.kit.objects import Object, pod_spec, reprieve_runtime, train_job
from tests.cluster.kit.pod_watch import PodState, PodWatch
from tests.cluster.rig.kubectl import POLL_S, Kubectl, KubectlError, has_condition
from tests.support.launch_kit import JOB, Lab, processes_with

NODES = 2
START_S = 120
"""How long a generation may take to train its first step: two processes import torch on two shared cores."""
RUNTIME_SEEN_WITHIN_S = 30


def training_pod(
    lab: Lab,
    *launcher: str,
    environment: dict[str, str] | None = None,
    security: dict[str, Any] | None = None,
    **options: Any,
) -> Object:
    """A pod without a TrainJob, which runs launch_job.py: `training_pod(lab, "python", steps=3)`."""
    spec = pod_spec(
        container="main",
        command=[sys.executable, "-m", "reprieve", "run", *launcher, JOB, lab.options(**options)],
        with_host_python=True,
        folders=[lab.job],
        environment=environment,
    )
    spec["containers"][0]["securityContext"] = security or {}
    return spec


def apply_train_jobs(kubectl: Kubectl, *jobs: Object) -> None:
    """Create TrainJobs. Trainer's webhook reads a cache, and refuses a job until it has seen the runtime there."""
    deadline = time.monotonic() + RUNTIME_SEEN_WITHIN_S
    while True:
        try:
            return kubectl.apply(*jobs)
        except KubectlError as error:
            if "must be created before the TrainJob" not in str(error) or time.monotonic() > deadline:
                raise
        time.sleep(POLL_S)


@dataclass(frozen=True, kw_only=True)
class Generation:
    """How the two pods of one start of the job ended, by rank."""

    pods: list[PodState]
    spans: dict[str, tuple[datetime, datetime]]
    """When the containers ran (`PodWatch.spans`)."""

    @property
    def exit_codes(self) -> list[int | None]:
        return [pod.exit_code for pod in self.pods]

    @property
    def seconds_apart(self) -> float:
        """From the end of the first pod until the end of the last. Kubernetes' times are whole seconds."""
        times = [self.spans[pod.uid][1].timestamp() for pod in self.pods]
        return max(times) - min(times)

    @property
    def message(self) -> dict[str, Any]:
        """The termination message of rank 0."""
        return dict(json.loads(self.pods[0].message))


@dataclass
class Training:
    """The TrainJob. `options` are those of launch_job.py."""

    namespace: Kubectl
    pods: PodWatch
    lab: Lab
    options: dict[str, Any]
    name: str = "train"
    resources: dict[str, str] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    """Further variables of the pods."""
    checkpointing: Object | None = None
    """Of the TrainJob's spec. Admission puts the launcher before the command then, where the operator is deployed."""
    nodes: int = NODES

    def start(self, runtime: Object | None = None) -> None:
        """Create the TrainJob, with the runtime reprieve-torch by default."""
        runtime = runtime or reprieve_runtime("reprieve-torch", self.pod(), max_restarts=3)
        script = ["torchrun", JOB, self.lab.options(**self.options)]
        command = [*([sys.executable, "-m", "reprieve", "run"] if self.checkpointing is None else []), *script]
        job = train_job(
            self.name,
            command,
            runtime=runtime["metadata"]["name"],
            nodes=self.nodes,
            resources=self.resources,
            labels=self.labels,
        )
        if self.checkpointing is not None:
            job["spec"]["checkpointing"] = self.checkpointing
        self.namespace.apply(runtime)
        apply_train_jobs(self.namespace, job)

    def pod(self) -> Object:
        return pod_spec(container="node", with_host_python=True, folders=[self.lab.job], environment=self.environment)

    @property
    def step(self) -> int:
        """The last step that both ranks have done."""
        return min(self.lab.last_step(rank) for rank in range(self.nodes))

    def wait_for_steps(self, count: int) -> None:
        """Wait until this generation has trained for so many steps."""
        end, began = time.monotonic() + START_S, self.step
        while self.step < began + count:
            assert time.monotonic() < end, f"no progress after step {self.step}; pods:\n{self.pods.history()}"
            time.sleep(0.05)

    def rank(self, number: int) -> str:
        """The name of the running pod of a rank."""
        return next(pod.name for pod in self.running() if pod.index == number)

    def running(self) -> list[PodState]:
        """The running pods of this job."""
        return [pod for pod in self.pods.running() if self._owns(pod)]

    def _owns(self, pod: PodState) -> bool:
        labels: dict[str, str] = pod.pod["metadata"].get("labels", {})
        return labels.get("jobset.sigs.k8s.io/jobset-name") == self.name

    def logs(self, rank: int = 0) -> str:
        """The log of the newest pod of a rank."""
        name = [pod.name for pod in self.pods.latest() if pod.index == rank and pod.name.startswith(self.name)][-1]
        return self.namespace.logs(name, "--container=node")

    def processes(self) -> list[int]:
        """The processes of this job's pods, as the machine sees them: launchers, torchruns, ranks."""
        return processes_with(str(self.lab.job))

    def after(self, disruption: Callable[[], None]) -> Generation:
        """Disrupt the running generation, wait until both its pods have ended, and return how they did."""
        uids = {pod.uid for pod in self.running()}
        assert len(uids) == self.nodes, self.pods.history()
        disruption()
        self.pods.wait_for(lambda watch: uids <= {pod.uid for pod in watch.ended()}, "both pods end", timeout_s=START_S)
        ended = [pod for pod in self.pods.ended() if pod.uid in uids]
        return Generation(pods=sorted(ended, key=lambda pod: pod.index or 0), spans=self.pods.spans())

    def suspend(self) -> None:
        self.namespace.patch("trainjob", self.name, {"spec": {"suspend": True}})

    def resume(self) -> None:
        self.namespace.patch("trainjob", self.name, {"spec": {"suspend": False}})

    def hurry(self) -> None:
        """Train the rest without the pauses of `step_s`."""
        (self.lab.job / "hurry").touch()

    def wait_until_complete(self) -> None:
        self.namespace.wait_for("trainjob", self.name, has_condition("Complete"), timeout_s=START_S)

    @property
    def counted_restarts(self) -> int:
        """The restarts that JobSet counts against `maxRestarts`."""
        status: Object = self.namespace.get("jobset", self.name).get("status", {})
        return int(status.get("restartsCountTowardsMax", 0))

    def assert_equal_to(self, undisturbed: Lab) -> None:
        """The losses of each step and the final weights are the same, bit for bit."""
        for rank in range(self.nodes):
            assert self.lab.seen(rank) == undisturbed.seen(rank), f"losses of rank {rank}"
        steps = self.options["steps"]
        assert self.lab.weights(steps) == undisturbed.weights(steps), "final weights"

    def assert_generations_never_overlapped(self) -> None:
        """No pod of this job started before all pods of the generation before had ended.

        Pods that ran at the same time are of one generation, so each rank is in it only once. Kubernetes' times are
        whole seconds: a pod may start in the second in which another one ends.
        """
        spans = self.pods.spans()
        ranks = {pod.uid: pod.index or 0 for pod in self.pods.latest() if self._owns(pod)}
        together: set[int] = set()
        until: datetime | None = None
        for began, ended, rank in sorted((*spans[uid], rank) for uid, rank in ranks.items() if uid in spans):
            if until is None or began >= until:
                together, until = set(), ended
            assert rank not in together, f"two pods of rank {rank} at the same time\n{self.pods.history()}"
            together.add(rank)
            until = max(until, ended)
