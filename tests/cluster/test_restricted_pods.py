"""Pods as hardened clusters run them, and pods that wait for each other: they train, save and end with 143."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.kit.cluster import Cluster
from tests.cluster.kit.objects import pod, pod_spec
from tests.cluster.kit.pod_watch import PodWatch
from tests.cluster.kit.training import Training
from tests.cluster.rig.kubectl import Kubectl
from tests.support.launch_kit import JOB, Lab, until

pytestmark = pytest.mark.timeout(600)

SLOT = "reprieve.dev/place"
UID = 1_000_650_000
"""As OpenShift chooses them: a number without a passwd entry."""
RESTRICTIONS: dict[str, dict[str, Any]] = {
    "read-only": {"readOnlyRootFilesystem": True},
    "random-uid": {"runAsUser": UID, "runAsGroup": 0},
    "both": {
        "readOnlyRootFilesystem": True,
        "runAsUser": UID,
        "runAsGroup": 0,
        "runAsNonRoot": True,
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
    },
}


def test_restricted_pods_train_and_save(namespace: Kubectl, pods: PodWatch, tmp_path: Path) -> None:
    """None of them has a volume for /tmp, so a read-only root file system leaves no place for temporary files."""
    labs = {}
    for name, context in RESTRICTIONS.items():
        (tmp_path / name).mkdir()
        labs[name] = lab = Lab(tmp_path / name)
        lab.job.chmod(0o777)
        command = [sys.executable, "-m", "reprieve", "run", "torchrun", "--nproc-per-node=1", JOB]
        spec = pod_spec(
            container="main",
            command=[*command, lab.options(steps=10_000, step_s=0.1)],
            with_host_python=True,
            folders=[lab.job],
            environment={"OMP_NUM_THREADS": "1"},
        )
        spec["containers"][0]["securityContext"] = context
        namespace.apply(pod(name, spec))
    until(lambda: all(lab.last_step() >= 3 for lab in labs.values()), limit_s=180)
    for name in RESTRICTIONS:
        namespace.delete("pod", name, wait=False)
    pods.wait_for(lambda watch: len(watch.ended()) == len(labs), "all pods end", timeout_s=60)
    for end in pods.ended():
        assert end.exit_code == 143, f"{end.name}\n{pods.history()}"
        message = json.loads(end.message)
        assert message["step"] == labs[end.name].last_step()
        assert f"saved at step {message['step']}" in message["message"]


def test_a_folder_that_the_uid_may_not_write_is_named(namespace: Kubectl, pods: PodWatch, tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    command = [sys.executable, "-m", "reprieve", "run", "python", JOB, lab.options(steps=3)]
    spec = pod_spec(
        container="main",
        command=command,
        with_host_python=True,
        folders=[lab.job],
        environment={"CHECKPOINT_URI": str(lab.job / "checkpoints")},
    )
    spec["containers"][0]["securityContext"] = {"runAsUser": UID}
    (lab.job / "seen-0.jsonl").touch()
    (lab.job / "seen-0.jsonl").chmod(0o666)
    namespace.apply(pod("refused", spec))
    pods.wait_for(lambda watch: len(watch.ended()) == 1, "the pod ends", timeout_s=120)
    [end] = pods.ended()
    assert end.exit_code == 42, namespace.logs("refused")
    for part in (str(UID), str(lab.job / "checkpoints"), "fsGroup"):
        assert part in end.message, end.message


@pytest.mark.parametrize("variable", ["REPRIEVE_GRACE", "CHECKPOINT_INTERVAL"])
def test_a_setting_that_cannot_be_parsed_ends_the_pod_at_once(
    namespace: Kubectl, pods: PodWatch, tmp_path: Path, variable: str
) -> None:
    lab = Lab(tmp_path)
    command = [sys.executable, "-m", "reprieve", "run", "python", JOB, lab.options(steps=3)]
    spec = pod_spec(
        container="main",
        command=command,
        with_host_python=True,
        folders=[lab.job],
        environment={variable: "soon"},
    )
    namespace.apply(pod("refused", spec))
    pods.wait_for(lambda watch: len(watch.ended()) == 1, "the pod ends", timeout_s=120)
    [end] = pods.ended()
    assert end.exit_code == 42, namespace.logs("refused")
    assert variable in end.message and "soon" in end.message, end.message


@pytest.fixture
def one_slot(cluster: Cluster) -> Iterator[Cluster]:
    _give_slots(cluster, 1)
    yield cluster
    _give_slots(cluster, None)


def _give_slots(cluster: Cluster, count: int | None) -> None:
    """Give the first node a resource of which each pod of the job takes one."""
    resource = {SLOT: None if count is None else str(count)}
    status = {"status": {"capacity": resource, "allocatable": resource}}
    cluster.kubectl.patch("node", cluster.nodes[0], status, "--subresource=status")


def test_a_rank_that_cannot_be_scheduled_is_waited_for(
    one_slot: Cluster, namespace: Kubectl, pods: PodWatch, tmp_path: Path
) -> None:
    """Without the runtime's setting, torchrun would give up, and that would count."""
    training = Training(namespace, pods, Lab(tmp_path), {"steps": 5}, resources={SLOT: "1"})
    training.start()
    pods.wait_for(lambda watch: len(watch.running()) == 1, "one pod runs", timeout_s=60)
    time.sleep(60)
    assert training.step == 0 and len(pods.running()) == 1, pods.history()
    _give_slots(one_slot, 2)
    training.wait_until_complete()
    assert training.counted_restarts == 0
    assert len(pods.latest()) == 2, "no pod was started twice"
