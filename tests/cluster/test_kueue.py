"""Kueue takes the quota of a job for a more important one: the job saves, waits, and resumes once it is admitted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.kit.cluster import Cluster
from tests.cluster.kit.objects import Object, pod_spec, train_job, training_runtime
from tests.cluster.kit.pod_watch import PodWatch
from tests.cluster.kit.training import Training
from tests.cluster.rig.kubectl import Kubectl, has_condition
from tests.support.launch_kit import Lab

pytestmark = [pytest.mark.kueue, pytest.mark.timeout(600)]

STEPS = 60
API = "kueue.x-k8s.io/v1beta2"
QUEUE = "reprieve-queue"
PRIORITIES = {"reprieve-low": 10, "reprieve-high": 100}
CPU = "100m"
"""Of each pod. The queue has a quota for two."""


@pytest.fixture
def queue(cluster: Cluster, namespace: Kubectl) -> Iterator[None]:
    """A queue of the namespace in which one job of two pods has room."""
    flavor = {"name": QUEUE, "resources": [{"name": "cpu", "nominalQuota": "200m"}]}
    objects = [
        _kueue("ResourceFlavor", QUEUE),
        _kueue(
            "ClusterQueue",
            QUEUE,
            namespaceSelector={},
            preemption={"withinClusterQueue": "LowerPriority"},
            resourceGroups=[{"coveredResources": ["cpu"], "flavors": [flavor]}],
        ),
        *({**_kueue("WorkloadPriorityClass", name), "value": value} for name, value in PRIORITIES.items()),
    ]
    cluster.kubectl.apply(*objects)
    namespace.apply(_kueue("LocalQueue", QUEUE, clusterQueue=QUEUE))
    yield
    for each in reversed(objects):
        cluster.kubectl.delete(each["kind"], each["metadata"]["name"], wait=False)


def _kueue(kind: str, name: str, **spec: Any) -> Object:
    found: Object = {"apiVersion": API, "kind": kind, "metadata": {"name": name}}
    return {**found, "spec": spec} if spec else found


def _labels(priority: str) -> dict[str, str]:
    return {"kueue.x-k8s.io/queue-name": QUEUE, "kueue.x-k8s.io/priority-class": priority}


@pytest.mark.usefixtures("queue")
def test_a_job_that_kueue_preempts_saves_and_resumes(
    namespace: Kubectl, pods: PodWatch, tmp_path: Path, undisturbed: Callable[..., list[Any]]
) -> None:
    training = Training(
        namespace,
        pods,
        Lab(tmp_path),
        {"steps": STEPS, "step_s": 0.1},
        resources={"cpu": CPU},
        labels=_labels("reprieve-low"),
    )

    def preempt() -> None:
        namespace.apply(training_runtime("python", pod_spec(container="node")))
        command = ["python3", "-c", "import time; time.sleep(3)"]
        labels = _labels("reprieve-high")
        job = train_job("urgent", command, runtime="python", nodes=2, labels=labels, resources={"cpu": CPU})
        namespace.apply(job)

    training.start()
    training.wait_for_steps(3)
    generation = training.after(preempt)
    assert generation.exit_codes == [143, 143], pods.history()
    assert training.lab.last_step(0) == training.lab.last_step(1)
    assert generation.message["step"] == training.step < STEPS
    assert "saved at step" in generation.message["message"]
    stopped_at = training.step
    namespace.wait_for("trainjob", "urgent", has_condition("Complete"), timeout_s=120)
    training.wait_until_complete()
    assert f"resuming from checkpoint-{stopped_at} " in training.logs()
    assert training.counted_restarts == 0
    assert [training.lab.seen(rank) for rank in range(2)] == undisturbed(steps=STEPS)
