"""Installs JobSet, Kubeflow Trainer, the training operator and Kueue, from the manifests of their own releases.

Each controller runs in a pod, makes the certificates of its webhooks itself, and is ready when the kubelet has
refreshed them. kustomize changes only what a cluster without a registry needs: image, pull policy, resource requests,
and how soon a pod is probed.
"""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.cluster.rig.kubectl import Kubectl
from tests.cluster.rig.layout import BuildOutput
from tests.cluster.rig.network import CONTROL_PLANE_NODE

READY_WITHIN_S = 180
KUEUE_FRAMEWORKS = ("batch/job", "jobset.x-k8s.io/jobset", "trainer.kubeflow.org/trainjob")
"""Kueue fails to start for a kind of job whose resource definition is missing."""


@dataclass(frozen=True, kw_only=True)
class Controller:
    """A deployment, and the kustomization that installs it."""

    name: str
    """Of the manifests and of the image."""
    namespace: str
    deployment: str
    kustomization: dict[str, Any]
    """`resources` are relative to the folder beside the manifests."""
    arguments: tuple[str, ...] = ()
    """Of the controller, if they are not those of the release."""
    config_map: tuple[str, str] | None = None
    """A ConfigMap of the kustomization, and the folder where the controller reads it."""


def _keep_name(name: str) -> dict[str, Any]:
    """Of a Secret or ConfigMap: kustomize would append a hash."""
    return {"name": name, "options": {"disableNameSuffixHash": True}}


JOBSET = Controller(
    name="jobset",
    namespace="jobset-system",
    deployment="jobset-controller-manager",
    kustomization={"resources": ["../jobset/default"]},
)
TRAINER = Controller(
    name="trainer",
    namespace="kubeflow-system",
    deployment="kubeflow-trainer-controller-manager",
    # The overlay of the release downloads JobSet: these are its other parts.
    kustomization={
        "namespace": "kubeflow-system",
        "resources": [
            "namespace.json",
            *(f"../trainer/base/{folder}" for folder in ("crds", "manager", "rbac", "webhook")),
        ],
        "secretGenerator": [_keep_name("kubeflow-trainer-webhook-cert")],
        "configMapGenerator": [{**_keep_name("kubeflow-trainer-public"), "literals": ["kubeflow_trainer_version=v2"]}],
    },
)
# Workers of a PyTorchJob wait until the name of the master leads somewhere. The operator's own container for that needs
# an image from a registry.
WAIT_FOR_MASTER = """\
- name: init-pytorch
  image: localhost/python:1
  imagePullPolicy: Never
  command: [sh, -c, "until getent hosts {{.MasterAddr}}; do sleep 0.2; done"]
"""
TRAINING_OPERATOR = Controller(
    name="training-operator",
    namespace="kubeflow",
    deployment="training-operator",
    # Of its six kinds of job, PyTorchJob alone: each resource definition costs the API server a second.
    kustomization={
        "resources": ["../training-operator/overlays/standalone"],
        "configMapGenerator": [
            {
                **_keep_name("init-container"),
                "namespace": "kubeflow",
                "literals": [f"initContainer.yaml={WAIT_FOR_MASTER}"],
            }
        ],
        "patches": [
            {
                "target": {"kind": "CustomResourceDefinition", "name": "(jax|mpi|paddle|tf|xgboost)jobs.kubeflow.org"},
                "patch": json.dumps(
                    {"$patch": "delete", "kind": "CustomResourceDefinition", "metadata": {"name": "_"}}
                ),
            }
        ],
    },
    arguments=("--enable-scheme=pytorchjob",),
    config_map=("init-container", "/etc/config"),
)
KUEUE = Controller(
    name="kueue",
    namespace="kueue-system",
    deployment="kueue-controller-manager",
    kustomization={"resources": ["../kueue/default"]},
)


def controllers(*, full: bool) -> tuple[Controller, ...]:
    return (JOBSET, TRAINER, TRAINING_OPERATOR, *((KUEUE,) if full else ()))


def install(controller: Controller, output: BuildOutput, kubectl: Kubectl, work: Path) -> None:
    """Apply the manifests of a controller. `wait_until_ready` waits for its pod."""
    copy = work / controller.name
    shutil.copytree(output.manifests(controller.name), copy, dirs_exist_ok=True)
    if controller is KUEUE:
        _limit_kueue(copy / "components" / "manager" / "controller_manager_config.yaml")
    folder = work / f"{controller.name}-installed"
    folder.mkdir(exist_ok=True)
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": controller.namespace}}
    (folder / "namespace.json").write_text(json.dumps(namespace))
    patches = [*controller.kustomization.get("patches", []), _deployment_patch(controller)]
    kustomization = {**controller.kustomization, "patches": patches}
    (folder / "kustomization.yaml").write_text(json.dumps(kustomization, indent=2))
    manifests = kubectl.run("kustomize", str(folder))
    # Client-side apply keeps a copy of the object in an annotation, for which some resource definitions are too large.
    kubectl.run("apply", "--server-side", "--force-conflicts", "--filename", "-", stdin=manifests)


def wait_until_ready(controller: Controller, kubectl: Kubectl) -> None:
    kubectl.for_namespace(controller.namespace).run(
        *("rollout", "status", f"deployment/{controller.deployment}", f"--timeout={READY_WITHIN_S}s"),
        timeout_s=READY_WITHIN_S + 10,
    )


def _deployment_patch(controller: Controller) -> dict[str, Any]:
    probe = {"initialDelaySeconds": 1, "periodSeconds": 1}
    pod = "/spec/template/spec"
    container = f"{pod}/containers/0"
    # Tests drain and freeze the other node.
    node = {"kubernetes.io/hostname": CONTROL_PLANE_NODE}
    changes = [
        {"op": "add", "path": f"{container}/image", "value": f"localhost/{controller.name}:1"},
        {"op": "add", "path": f"{container}/imagePullPolicy", "value": "Never"},
        {"op": "add", "path": f"{container}/resources", "value": {"requests": {"cpu": "50m", "memory": "64Mi"}}},
        {"op": "add", "path": f"{pod}/nodeSelector", "value": node},
        *({"op": "add", "path": f"{container}/readinessProbe/{key}", "value": value} for key, value in probe.items()),
    ]
    if controller.config_map:
        name, folder = controller.config_map
        changes += [
            {"op": "add", "path": f"{pod}/volumes/-", "value": {"name": name, "configMap": {"name": name}}},
            {"op": "add", "path": f"{container}/volumeMounts/-", "value": {"name": name, "mountPath": folder}},
        ]
    if controller.arguments:
        changes.append({"op": "add", "path": f"{container}/args", "value": list(controller.arguments)})
    return {"target": {"kind": "Deployment", "name": controller.deployment}, "patch": json.dumps(changes)}


def _limit_kueue(configuration: Path) -> None:
    frameworks = "".join(f'  - "{name}"\n' for name in KUEUE_FRAMEWORKS)
    text, count = re.subn(
        r"  frameworks:\n(?:\s*#?\s*- .*\n)+", f"  frameworks:\n{frameworks}", configuration.read_text()
    )
    assert count == 1, configuration
    configuration.write_text(text)
