"""Pods as hardened clusters run them, and pods that wait for each other: they train, save and end with 143."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.kit.cluster import Cluster
from tests.cluster.kit.objects import RESTRICTIONS, UID, Object, pod, reprieve_runtime
from tests.cluster.kit.pod_watch import PodState, PodWatch
from tests.cluster.kit.training import Training, training_pod
from tests.cluster.rig.kubectl import Kubectl
from tests.support.launch_kit import Lab, until

pytestmark = pytest.mark.timeout(600)

SLOTS = {"waits": "reprieve.dev/place-of-waits", "gives-up": "reprieve.dev/place-of-gives-up"}
UNSCHEDULABLE_S = 60


def test_restricted_pods_train_and_save(namespace: Kubectl, pods: PodWatch, tmp_path: Path) -> None:
    """None of them has a volume for /tmp, so a read-only root file system leaves no place for temporary files."""
    labs = {}
    for name, context in {"no-volume": {}, **RESTRICTIONS}.items():
        (tmp_path / name).mkdir()
        labs[name] = lab = Lab(tmp_path / name)
        lab.job.chmod(0o777)
        spec = training_pod(lab, "torchrun", "--nproc-per-node=1", security=context, steps=10_000, step_s=0.1)
        namespace.apply(pod(name, spec))
    until(lambda: all(lab.last_step() >= 3 for lab in labs.values()), limit_s=180)
    for name in labs:
        namespace.delete("pod", name, wait=False)
    pods.wait_for(lambda watch: len(watch.ended()) == len(labs), "all pods end", timeout_s=60)
    for end in pods.ended():
        assert end.exit_code == 143, f"{end.name}\n{pods.history()}"
        message = json.loads(end.message)
        assert message["step"] == labs[end.name].last_step()
        assert f"saved at step {message['step']}" in message["message"]


def test_a_folder_that_the_uid_may_not_write_is_named(namespace: Kubectl, pods: PodWatch, tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    for name in ("seen-0.jsonl", "reached-0"):
        (lab.job / name).touch()
        (lab.job / name).chmod(0o666)
    environment = {"CHECKPOINT_URI": str(lab.job / "checkpoints")}
    spec = training_pod(lab, "python", environment=environment, security={"runAsUser": UID}, steps=3)
    end = _refused(spec, namespace, pods)
    for part in (str(UID), str(lab.job / "checkpoints"), "fsGroup"):
        assert part in end.message, end.message


@pytest.mark.parametrize("variable", ["REPRIEVE_GRACE", "CHECKPOINT_INTERVAL"])
def test_a_setting_that_cannot_be_parsed_ends_the_pod_at_once(
    namespace: Kubectl, pods: PodWatch, tmp_path: Path, variable: str
) -> None:
    end = _refused(training_pod(Lab(tmp_path), "python", environment={variable: "soon"}, steps=3), namespace, pods)
    assert variable in end.message and "soon" in end.message, end.message


def _refused(spec: Object, namespace: Kubectl, pods: PodWatch) -> PodState:
    """Run a pod that ends with 42, and return how it ended."""
    namespace.apply(pod("refused", spec))
    pods.wait_for(lambda watch: len(watch.ended()) == 1, "the pod ends", timeout_s=120)
    [end] = pods.ended()
    assert end.exit_code == 42, namespace.logs("refused")
    return end


@pytest.fixture
def one_slot_each(cluster: Cluster) -> Iterator[Cluster]:
    _give_slots(cluster, 1)
    yield cluster
    _give_slots(cluster, None)


def _give_slots(cluster: Cluster, count: int | None) -> None:
    """Give the first node resources, one for each job, of which each pod of the job takes one."""
    resources = {slot: None if count is None else str(count) for slot in SLOTS.values()}
    status = {"status": {"capacity": resources, "allocatable": resources}}
    cluster.kubectl.patch("node", cluster.nodes[0], status, "--subresource=status")


def test_a_rank_that_cannot_be_scheduled_is_waited_for(
    one_slot_each: Cluster, namespace: Kubectl, pods: PodWatch, tmp_path: Path
) -> None:
    """With a rendezvous that gives up after 20 s, the same wait costs restarts. torchrun's own gives up after 600 s."""
    gives_up = {"PET_RDZV_CONF": "timeout=20,join_timeout=20"}
    trainings = {}
    for name, environment in (("waits", {}), ("gives-up", gives_up)):
        (tmp_path / name).mkdir()
        training = Training(
            namespace,
            pods,
            Lab(tmp_path / name),
            {"steps": 5},
            name=name,
            resources={SLOTS[name]: "1"},
            environment=environment,
        )
        training.start(reprieve_runtime(name, training.pod(), max_restarts=10))
        trainings[name] = training
    waits = trainings["waits"]
    pods.wait_for(lambda _: len(waits.running()) == 1, "one pod runs", timeout_s=60)
    began = time.monotonic()
    until(lambda: trainings["gives-up"].counted_restarts >= 1, limit_s=UNSCHEDULABLE_S + 60)
    namespace.delete("trainjob", "gives-up", wait=False)
    time.sleep(max(0.0, began + UNSCHEDULABLE_S - time.monotonic()))
    assert waits.step == 0 and len(waits.running()) == 1, pods.history()
    _give_slots(one_slot_each, 2)
    waits.wait_until_complete()
    assert waits.counted_restarts == 0
    assert len([pod for pod in pods.latest() if pod.name.startswith("waits-")]) == 2, "no pod was started twice"
