"""What a cluster does to a training job of two nodes, with real torch over pod DNS: nothing is lost, nothing counts.

One job goes through all of it: a start of two pods that import torch takes long on a small machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cluster.kit.cluster import Cluster
from tests.cluster.kit.objects import pod, pod_spec, training_runtime
from tests.cluster.kit.pod_watch import PodWatch
from tests.cluster.kit.training import NODES, Training
from tests.cluster.rig.kubectl import Kubectl, has_condition
from tests.support.launch_kit import Lab, until

STEPS = 400
SLOT = "reprieve.dev/slot"
"""A resource of the node: each pod of a job takes one, and there are as many as the job has pods."""

COLLECTIVE_TIMEOUT_S = 4
REFUSED_WITHIN_S = 20

pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def slots(cluster: Cluster) -> Iterator[None]:
    """Give the nodes two slots together, so that the scheduler must preempt a pod of the job for a third."""
    each = str(2 // len(cluster.nodes))
    capacity = {"status": {"capacity": {SLOT: each}, "allocatable": {SLOT: each}}}
    for node in cluster.nodes:
        cluster.kubectl.patch("node", node, capacity, "--subresource=status")
    cluster.kubectl.apply(
        {
            "apiVersion": "scheduling.k8s.io/v1",
            "kind": "PriorityClass",
            "metadata": {"name": "reprieve-urgent"},
            "value": 1000,
        }
    )
    yield
    for node in cluster.nodes:
        nothing = {"status": {"capacity": {SLOT: None}, "allocatable": {SLOT: None}}}
        cluster.kubectl.patch("node", node, nothing, "--subresource=status")


@pytest.mark.usefixtures("slots")
def test_a_job_survives_all_that_a_cluster_does_to_it(
    cluster: Cluster, namespace: Kubectl, pods: PodWatch, tmp_path: Path, undisturbed: Callable[..., Lab]
) -> None:
    training = Training(namespace, pods, Lab(tmp_path), {"steps": STEPS, "step_s": 0.1}, resources={SLOT: "1"})

    def drain() -> None:
        """Drain the node of rank 1, not all nodes in turn: that would hit the next generation while it starts."""
        node = next(pod.node for pod in pods.running() if pod.index == 1)
        selector = f"--pod-selector=jobset.sigs.k8s.io/jobset-name={training.name}"
        try:
            cluster.kubectl.run("drain", node, selector, "--delete-emptydir-data", "--force", timeout_s=180)
        finally:
            cluster.kubectl.run("uncordon", node)

    def preempt() -> None:
        spec = pod_spec(container="main", command=["python3", "-c", "pass"], priorityClassName="reprieve-urgent")
        spec["containers"][0]["resources"] = {"requests": {SLOT: "1"}, "limits": {SLOT: "1"}}
        namespace.apply(pod("urgent", spec))

    disruptions: dict[str, Callable[[], None]] = {
        "delete of rank 0": lambda: namespace.delete("pod", training.rank(0), wait=False),
        "delete of rank 1": lambda: namespace.delete("pod", training.rank(1), wait=False),
        "eviction of rank 1": lambda: namespace.evict(training.rank(1)),
        "drain": drain,
        "suspend": training.suspend,
        "scheduler preemption": preempt,
    }
    training.start()
    for name, disruption in disruptions.items():
        training.wait_for_steps(3)
        generation = training.after(disruption)
        assert generation.exit_codes == [143, 143], f"{name}\n{pods.history()}"
        assert generation.seconds_apart <= 5, f"{name}\n{pods.history()}"
        assert training.lab.last_step(0) == training.lab.last_step(1), f"{name}: one common step"
        assert generation.message["step"] == training.step < STEPS, name
        assert "saved at step" in generation.message["message"], name
        if name == "suspend":
            training.resume()
    training.hurry()
    training.wait_until_complete()
    assert training.counted_restarts == 0
    training.assert_generations_never_overlapped()
    training.assert_equal_to(undisturbed(steps=STEPS))


def test_a_save_that_takes_longer_than_the_timeout_of_collectives(
    namespace: Kubectl, pods: PodWatch, tmp_path: Path, undisturbed: Callable[..., Lab]
) -> None:
    job = {"steps": 60, "width": 14_000}
    options = {**job, "step_s": 0.1, "slow": 150_000, "collective_timeout_s": COLLECTIVE_TIMEOUT_S}
    training = Training(namespace, pods, Lab(tmp_path), options)
    training.start()
    training.wait_for_steps(3)
    generation = training.after(lambda: namespace.evict(training.rank(1)))
    assert generation.exit_codes == [143, 143], pods.history()
    assert generation.seconds_apart <= 5
    save_s = float(generation.message["checkpointing"]["lastSaveDuration"].removesuffix("s"))
    assert save_s > COLLECTIVE_TIMEOUT_S
    stopped_at = training.step
    training.wait_until_complete()
    assert training.counted_restarts == 0
    assert f"resuming from checkpoint-{stopped_at} (step {stopped_at})" in training.logs()
    training.assert_generations_never_overlapped()
    training.assert_equal_to(undisturbed(**job))


def test_a_pod_that_starts_while_its_predecessor_saves_waits_for_it(
    namespace: Kubectl, pods: PodWatch, tmp_path: Path
) -> None:
    """With a runtime that knows nothing of Reprieve, new pods start at once when a job is resumed. The name of node 0
    then leads to two pods, and torchrun must not join the rendezvous of the old one: it would wait there for ever."""
    grace_period_s = 120
    environment = {"REPRIEVE_GRACE": str(grace_period_s - 2)}
    options = {"steps": STEPS, "step_s": 0.1, "holds_saves": True}
    training = Training(namespace, pods, Lab(tmp_path), options, environment=environment)
    spec = {**training.pod(), "restartPolicy": "OnFailure", "terminationGracePeriodSeconds": grace_period_s}
    training.start(training_runtime("torch-distributed", spec))
    training.wait_for_steps(3)
    hold = training.lab.job / "hold"
    hold.touch()

    def suspend_and_resume() -> None:
        old = {pod.uid for pod in pods.latest()}
        training.suspend()
        until(lambda: list((training.lab.job / "checkpoints").glob(".checkpoint-*.saving*")), limit_s=60)
        training.resume()
        pods.wait_for(lambda watch: len({pod.uid for pod in watch.running()} - old) == NODES, "new pods run")
        until(lambda: all("waiting up to" in training.logs(rank) for rank in range(NODES)), limit_s=60)
        hold.unlink()

    generation = training.after(suspend_and_resume)
    assert generation.exit_codes == [143, 143], pods.history()
    stopped_at = generation.message["step"]
    training.hurry()
    training.wait_until_complete()
    assert f"resuming from checkpoint-{stopped_at}" in training.logs()
    assert [pod.restarts for pod in pods.latest()] == [0] * 2 * NODES, "no pod failed meanwhile"


def test_a_second_job_on_the_folder_is_refused(namespace: Kubectl, pods: PodWatch, tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    first = Training(namespace, pods, lab, {"steps": 10_000, "step_s": 0.1}, name="first")
    first.start()
    first.wait_for_steps(3)
    second = Training(namespace, pods, lab, {"steps": 10_000, "step_s": 0.1}, name="second")
    second.start()
    pods.wait_for(lambda watch: len(watch.ended()) >= 1, "the second job ends", timeout_s=120)
    refused = pods.ended()[0]
    assert refused.name.startswith("second-") and refused.exit_code == 42, pods.history()
    assert "is in use by run" in refused.message, refused.message
    # From the end of its imports: on a busy machine, torch alone may take longer than that.
    began = (lab.job / "reached-0").stat().st_mtime
    assert pods.spans()[refused.uid][1].timestamp() - began <= REFUSED_WITHIN_S, pods.history()
    namespace.wait_for("trainjob", "second", has_condition("Failed"), timeout_s=60)
    assert len(first.running()) == 2, "the first job trains on"


def test_the_log_of_a_pod_shows_that_checkpoints_are_on(namespace: Kubectl, pods: PodWatch, tmp_path: Path) -> None:
    training = Training(namespace, pods, Lab(tmp_path), {"steps": 3})
    training.start()
    training.wait_until_complete()
    for rank in range(NODES):
        lines = [line for line in training.logs(rank).splitlines() if "jit" in line.lower()]
        assert lines == [
            "[Kubeflow] JIT checkpoint signal handler registered for SIGTERM",
            "[Kubeflow] JIT checkpointing enabled",
        ], f"rank {rank}"
