"""Kueue takes the quota of a job for a more important one: the job saves, waits, and resumes once it is admitted."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from reprieve.kubernetes.names import ADMISSION_MANAGER
from tests.cluster.kit.cluster import Cluster
from tests.cluster.kit.objects import HOST_PATH, Object, pod_spec, train_job, training_runtime
from tests.cluster.kit.pod_watch import PodWatch
from tests.cluster.kit.status import POLL_ANNOTATION, POLL_S, wait_for_state
from tests.cluster.kit.training import Training, apply_train_jobs
from tests.cluster.kit.written_jobs import writes_of
from tests.cluster.rig.kubectl import Kubectl, has_condition
from tests.support.golden import check_golden
from tests.support.launch_kit import Lab
from tests.support.places import FIXTURES

pytestmark = [pytest.mark.kueue, pytest.mark.timeout(600)]

STEPS = 400
API = "kueue.x-k8s.io/v1beta2"
QUEUE = "reprieve-queue"
PRIORITIES = {"reprieve-low": 10, "reprieve-high": 100}
RECORD = FIXTURES / "kueue"
CPU = "100m"
"""Of each pod. The queue has a quota for two."""
STAYS_S = 10
"""How long a pause is watched."""


@pytest.fixture
def queue(cluster: Cluster, namespace: Kubectl) -> Iterator[None]:
    """A queue of the namespace in which one job of two pods has room."""
    flavor = {"name": QUEUE, "resources": [{"name": "cpu", "nominalQuota": "200m"}]}
    objects = [
        _kueue("ResourceFlavor", QUEUE, nodeLabels={"kubernetes.io/os": "linux"}),
        _kueue(
            "ClusterQueue",
            QUEUE,
            namespaceSelector={},
            preemption={"withinClusterQueue": "LowerPriority"},
            resourceGroups=[{"coveredResources": ["cpu"], "flavors": [flavor]}],
        ),
        *({**_kueue("WorkloadPriorityClass", name), "value": value} for name, value in PRIORITIES.items()),
    ]
    # Those of the test before go when its Workloads have gone.
    earlier = [f"{each['kind']}/{each['metadata']['name']}" for each in objects]
    cluster.kubectl.run("wait", "--for=delete", "--timeout=240s", *earlier, timeout_s=250)
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


@pytest.fixture
def training(namespace: Kubectl, pods: PodWatch, tmp_path: Path, queue: None) -> Training:
    """A job of low priority in the queue."""
    options = {"steps": STEPS, "step_s": 0.1}
    labels = _labels("reprieve-low")
    return Training(namespace, pods, Lab(tmp_path), options, resources={"cpu": CPU}, labels=labels)


def assert_it_is_preempted_and_resumes(training: Training, undisturbed: Callable[..., Lab]) -> None:
    namespace, history = training.namespace, training.pods.history

    def preempt() -> None:
        namespace.apply(training_runtime("python", pod_spec(container="node")))
        apply_train_jobs(namespace, urgent_job("import time; time.sleep(3)"))

    training.start()
    training.wait_for_steps(3)
    generation = training.after(preempt)
    assert generation.exit_codes == [143, 143], history()
    assert generation.seconds_apart <= 5, history()
    assert training.lab.last_step(0) == training.lab.last_step(1)
    assert generation.message["step"] == training.step < STEPS
    assert "saved at step" in generation.message["message"]
    stopped_at = training.step
    training.hurry()
    namespace.wait_for("trainjob", "urgent", has_condition("Complete"), timeout_s=120)
    training.wait_until_complete()
    assert f"resuming from checkpoint-{stopped_at} " in training.logs()
    assert training.counted_restarts == 0
    training.assert_generations_never_overlapped()
    training.assert_equal_to(undisturbed(steps=STEPS))


def test_a_job_that_kueue_preempts_saves_and_resumes(training: Training, undisturbed: Callable[..., Lab]) -> None:
    assert_it_is_preempted_and_resumes(training, undisturbed)


@pytest.mark.usefixtures("operator", "queue", "runtime")
def test_kueue_writes_what_is_recorded(cluster: Cluster, namespace: Kubectl) -> None:
    """test_checkpointing.py replays the record on clusters without Kueue. No pod runs here: there is no claim."""
    instance = cluster.own_instance()
    job = yaml.safe_load((RECORD / "job.yaml").read_text())
    name = job["metadata"]["name"]
    namespace.create(job)
    namespace.wait_for("trainjob", name, _is_admitted)
    namespace.apply(training_runtime("python", pod_spec(container="node")))
    apply_train_jobs(namespace, urgent_job("import time; time.sleep(600)"))
    namespace.wait_for("trainjob", name, lambda found: not _is_admitted(found))
    namespace.wait_for("trainjob", "urgent", _is_admitted)
    namespace.delete("trainjob", "urgent")
    namespace.wait_for("trainjob", name, _is_admitted)
    writes = writes_of("kueue", instance, namespace.namespace, name)
    check_golden(RECORD / "writes.yaml", yaml.safe_dump_all(writes, width=120))


def _is_admitted(job: Object) -> bool:
    return not job["spec"].get("suspend")


def urgent_job(script: str) -> Object:
    """A job of high priority that takes the whole queue."""
    labels = _labels("reprieve-high")
    return train_job(
        "urgent", ["python3", "-c", script], runtime="python", nodes=2, labels=labels, resources={"cpu": CPU}
    )


@pytest.mark.usefixtures("operator")
def test_kueue_loses_nothing_of_a_job_that_asks_for_checkpoints(
    training: Training, undisturbed: Callable[..., Lab]
) -> None:
    """Kueue writes the job three times: it admits, preempts and admits it again."""
    training.checkpointing = {"storage": {"uri": f"{training.lab.job}/checkpoints"}, "interval": "1h"}
    training.options["by_environment"] = True
    training.environment["PATH"] = HOST_PATH
    assert_it_is_preempted_and_resumes(training, undisturbed)
    options = ("--output", "json", "--show-managed-fields")
    stored = json.loads(training.namespace.run("get", "trainjob", training.name, *options))
    assert stored["spec"]["checkpointing"]["interval"] == "1h"
    assert ADMISSION_MANAGER in [each["manager"] for each in stored["spec"]["runtimePatches"]]
    writers = {each["manager"] for each in stored["metadata"]["managedFields"]}
    assert any("kueue" in writer for writer in writers), writers


@pytest.mark.usefixtures("operator")
def test_a_pause_by_verb_goes_through_the_workload(
    cluster: Cluster, training: Training, undisturbed: Callable[..., Lab]
) -> None:
    """Kueue resumes a job at once whose `spec.suspend` somebody else has set."""
    training.checkpointing = {"storage": {"uri": f"{training.lab.job}/checkpoints"}, "interval": "1h"}
    training.options["by_environment"] = True
    training.environment["PATH"] = HOST_PATH
    namespace, job = training.namespace, f"trainjob/{training.name}"

    def verb(name: str) -> str:
        done = cluster.run(sys.executable, "-m", "reprieve", name, job, "--namespace", namespace.namespace)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    training.start()
    namespace.run("annotate", "trainjob", training.name, f"{POLL_ANNOTATION}={POLL_S}")
    training.wait_for_steps(10)
    output = verb("pause")
    saved = training.lab.last_step(0)
    assert f"checkpoint-{saved}" in output, output
    paused = wait_for_state(namespace, training.name, "Paused", within_s=60)
    assert (paused["step"], paused["checkpointing"]["latestCheckpoint"].rpartition("-")[2]) == (saved, str(saved))
    [workload] = namespace.list("workloads")
    assert workload["spec"]["active"] is False
    time.sleep(STAYS_S)
    assert training.running() == [], "Kueue has not resumed it"
    training.hurry()
    verb("resume")
    training.wait_until_complete()
    wait_for_state(namespace, training.name, "Succeeded", within_s=60)
    assert training.counted_restarts == 0
    training.assert_equal_to(undisturbed(steps=STEPS))
