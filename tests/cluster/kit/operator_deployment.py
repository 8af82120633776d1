"""Deploys deploy/install.yaml with the Python of this checkout, and takes it away again.

Not called operator.py: scripts of this folder run in pods, where it would hide Python's own module.

Certificates live for 40 s, so that all tests run across renewals.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import yaml

from reprieve.kubernetes.crd_install import FIELD_MANAGER
from tests.cluster.kit.cluster import Cluster
from tests.cluster.kit.objects import HOST_PYTHON, IMAGE, Object, host_folders, mount
from tests.cluster.rig.kubectl import Kubectl, KubectlError
from tests.cluster.rig.layout import build_output
from tests.cluster.rig.network import CONTROL_PLANE_NODE
from tests.support.places import ROOT

MANIFEST = ROOT / "deploy/install.yaml"
NAME = "reprieve-operator"
NAMESPACE = "reprieve-system"
SECRET = "reprieve-operator-certificates"
CRD = "trainjobs.trainer.kubeflow.org"
CERTIFICATE_LIFE = "40s"
"""Renewed after 24 s, served 4 s later."""
UID = 65532
"""Of the operator's image. That of the tests runs as root."""
READY_WITHIN_S = 120
RECORD_GONE_WITHIN_S = 5
LOG_LINES = 100
POLL_S = 0.2


@dataclass(frozen=True)
class Operator:
    """The operator of the session. `kubectl` is bound to its namespace."""

    cluster: Cluster
    kubectl: Kubectl

    def pods(self) -> list[str]:
        """The pods that are not going away."""
        found = self.kubectl.list("pods", selector=f"app.kubernetes.io/name={NAME}")
        return [pod["metadata"]["name"] for pod in found if "deletionTimestamp" not in pod["metadata"]]

    def scale(self, replicas: int) -> None:
        """Change the number of replicas, and wait until they are ready, or gone."""
        self.kubectl.run("scale", f"deployment/{NAME}", f"--replicas={replicas}")
        if replicas:
            self.wait_until_ready()
        else:
            options = (f"--selector=app.kubernetes.io/name={NAME}", "--timeout=60s")
            self.kubectl.run("wait", "pods", "--for=delete", *options, timeout_s=70)

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """Without replicas; the webhook configuration and the resource definition stay."""
        self.scale(0)
        try:
            yield
        finally:
            self.scale(2)

    @contextlib.contextmanager
    def without_webhook(self) -> Iterator[None]:
        """Without the webhook configuration. The operator writes its certificates into it when it runs again."""
        [configuration] = [each for each in manifests() if each["kind"] == "MutatingWebhookConfiguration"]
        self.cluster.kubectl.delete(configuration["kind"], NAME)
        try:
            yield
        finally:
            self.cluster.kubectl.apply(configuration)

    def wait_until_ready(self) -> None:
        """Wait until the replicas answer, and the resource definition has our part."""
        options = (f"deployment/{NAME}", f"--timeout={READY_WITHIN_S}s")
        self.kubectl.run("rollout", "status", *options, timeout_s=READY_WITHIN_S + 10)
        self.wait_until_definition_is_ours(READY_WITHIN_S)

    def definition(self) -> Object:
        """The resource definition of TrainJobs, with the records of who has written it."""
        found: Object = json.loads(
            self.cluster.kubectl.run("get", "crd", CRD, "--output", "json", "--show-managed-fields")
        )
        return found

    def wait_until_definition_is_ours(self, within_s: float) -> None:
        """Wait until our part is there, and soon after no record says whose it is: Trainer's next apply must not
        conflict."""
        began = time.monotonic()
        while True:
            found = self.definition()
            is_ours = has_checkpointing(found)
            managers = [record["manager"] for record in found["metadata"]["managedFields"]]
            if is_ours and FIELD_MANAGER not in managers:
                return
            limit_s = within_s + (RECORD_GONE_WITHIN_S if is_ours else 0)
            assert time.monotonic() - began < limit_s, f"written by {managers}, ours: {is_ours}"
            time.sleep(POLL_S)

    def leader(self) -> str:
        """The pod that writes progress; empty: none does."""
        lease = self.kubectl.find("lease", NAME) or {}
        return str(lease.get("spec", {}).get("holderIdentity") or "").rpartition("-")[0]

    def leader_address(self) -> str:
        return str(self.kubectl.get("pod", self.leader())["status"]["podIP"])

    def log(self) -> list[dict[str, Any]]:
        """The lines of all pods."""
        lines = [line for pod in self.pods() for line in self.kubectl.logs(pod).splitlines()]
        return [json.loads(line) for line in lines]


def has_checkpointing(crd: Object) -> bool:
    return all("checkpointing" in properties(crd, version)["spec"]["properties"] for version in crd["spec"]["versions"])


def properties(crd: Object, version: Object | None = None) -> dict[str, Any]:
    version = version or crd["spec"]["versions"][0]
    found: dict[str, Any] = version["schema"]["openAPIV3Schema"]["properties"]
    return found


def manifests() -> list[Object]:
    """What is deployed, without the runtime: tests have runtimes of their own, with the same name."""
    found = list(yaml.safe_load_all(MANIFEST.read_text()))
    return [each for each in found if each["kind"] != "ClusterTrainingRuntime"]


def with_host_python(objects: list[Object]) -> list[Object]:
    """Return the manifests with the Python of this checkout in the pods.

    hostPath volumes are forbidden in a restricted namespace, so the namespace is not one. That the pods as they are
    deployed would be admitted there, a test checks.
    """
    for each in objects:
        if each["kind"] == "Namespace":
            del each["metadata"]["labels"]
        if each["kind"] == "Deployment":
            pod = each["spec"]["template"]["spec"]
            [container] = pod["containers"]
            mounts = [mount(f"host-{number}", path, read_only=True) for number, path in enumerate(host_folders())]
            pod["volumes"] = [volume for volume, _ in mounts]
            pod["securityContext"] |= {"runAsUser": UID, "runAsGroup": UID}
            # Tests drain and freeze the other node.
            pod["nodeSelector"] = {"kubernetes.io/hostname": CONTROL_PLANE_NODE}
            container |= {
                "image": IMAGE,
                "imagePullPolicy": "Never",
                "command": [sys.executable, "-m", "reprieve", "operator"],
                "env": [{"name": name, "value": value} for name, value in HOST_PYTHON.items()],
                "volumeMounts": [mounted for _, mounted in mounts],
            }
            container["args"].append(f"--certificate-life={CERTIFICATE_LIFE}")  # the last one counts
    return objects


@contextlib.contextmanager
def deployed(cluster: Cluster) -> Iterator[Operator]:
    """Deploy the operator, and remove every trace of it at the end."""
    operator = Operator(cluster, cluster.kubectl.for_namespace(NAMESPACE))
    try:
        deploy(operator)
        yield operator
    finally:
        remove(cluster)


def deploy(operator: Operator) -> None:
    operator.cluster.kubectl.apply(*with_host_python(manifests()))
    try:
        operator.wait_until_ready()
    except (KubectlError, AssertionError) as error:
        raise AssertionError(f"the operator is not ready: {error}\n{_state(operator)}") from error


@contextlib.contextmanager
def undeployed(cluster: Cluster) -> Iterator[None]:
    """Without the operator of the session, if it is there: the names of its objects exist once in a cluster."""
    operator = Operator(cluster, cluster.kubectl.for_namespace(NAMESPACE))
    was_there = operator.kubectl.find("deployment", NAME) is not None
    if was_there:
        remove(cluster)
    yield
    if was_there:
        deploy(operator)


def remove(cluster: Cluster) -> None:
    """Remove the webhook first: without replicas, it refuses jobs that ask for checkpoints."""
    for each in reversed(manifests()):
        namespace = each["metadata"].get("namespace")
        kubectl = cluster.kubectl.for_namespace(namespace) if namespace else cluster.kubectl
        kubectl.delete(each["kind"], each["metadata"]["name"])
    apply_upstream_definition(cluster)


def apply_upstream_definition(cluster: Cluster) -> None:
    """As an upgrade of Trainer does: server-side and without force."""
    folder = build_output().manifests("trainer") / "base" / "crds"
    cluster.kubectl.run("apply", "--server-side", "--filename", str(folder / "trainer.kubeflow.org_trainjobs.yaml"))


def _state(operator: Operator) -> str:
    pods = operator.kubectl.run("get", "pods", "--output", "wide")
    logs = [operator.kubectl.logs(pod, f"--tail={LOG_LINES}") for pod in operator.pods()]
    events = operator.kubectl.run("get", "events", "--sort-by=.lastTimestamp")
    return "\n".join([pods, *logs, events])
