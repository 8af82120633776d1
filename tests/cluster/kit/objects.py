"""Builders of the objects that tests create: runtimes, TrainJobs, pods that run the Python of this checkout.

The image of the pods has Debian and its Python only. `host_python()` adds the environment of the checkout: the folders
that it lives in are mounted read-only at the same paths, so that `sys.executable` and the editable install work there.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import yaml

from tests.support.places import ROOT, SITE

Object = dict[str, Any]

IMAGE = "localhost/python:1"
TRAINER_API = "trainer.kubeflow.org/v1alpha1"
GRACE_PERIOD_S = 30
HOST_PYTHON = {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(SITE)}
"""The environment of pods that run the Python of this checkout: they share two cores, and cannot write to it."""
HOST_PATH = f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin"
"""Where such pods find the launcher and torchrun."""

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


def host_folders() -> list[Path]:
    """The checkout, its environment and the Python below it; folders inside another one of them are left out."""
    folders = {ROOT, Path(sys.prefix), Path(sys.base_prefix), Path(sys.executable).resolve().parent.parent}
    return sorted(
        each for each in folders if not any(each != other and each.is_relative_to(other) for other in folders)
    )


def mount(name: str, path: Path, *, read_only: bool = False) -> tuple[Object, Object]:
    """A volume and its mount: a folder of the machine, at the same path in the pod."""
    volume = {"name": name, "hostPath": {"path": str(path), "type": "DirectoryOrCreate"}}
    return volume, {"name": name, "mountPath": str(path), "readOnly": read_only}


def pod_spec(
    *,
    container: str,
    command: list[str] | None = None,
    with_host_python: bool = False,
    folders: list[Path] | None = None,
    environment: dict[str, str] | None = None,
    grace_period_s: int = GRACE_PERIOD_S,
    **fields: Any,
) -> Object:
    """A pod with one container. `folders` are mounted writable; `fields` are further fields of the spec."""
    mounts = [mount(f"folder-{number}", path) for number, path in enumerate(folders or [])]
    environment = {**(HOST_PYTHON if with_host_python else {}), **(environment or {})}
    if with_host_python:
        mounts += [mount(f"host-{number}", path, read_only=True) for number, path in enumerate(host_folders())]
    main: Object = {
        "name": container,
        "image": IMAGE,
        "imagePullPolicy": "Never",
        "env": [{"name": name, "value": value} for name, value in environment.items()],
        "volumeMounts": [mounted for _, mounted in mounts],
    }
    if command is not None:
        main["command"] = command
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": grace_period_s,
        "containers": [main],
        "volumes": [volume for volume, _ in mounts],
        **fields,
    }


def pod(name: str, spec: Object) -> Object:
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}


def training_runtime(name: str, spec: Object, **job_fields: Any) -> Object:
    """A TrainingRuntime of the namespace, with Trainer's torch policy. `job_fields` go into the spec of the Job."""
    template = {
        "metadata": {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}},
        "spec": {"template": {"spec": spec}, **job_fields},
    }
    return {
        "apiVersion": TRAINER_API,
        "kind": "TrainingRuntime",
        "metadata": {"name": name, "labels": {"trainer.kubeflow.org/framework": "torch"}},
        "spec": {
            "mlPolicy": {"numNodes": 1, "torch": {}},
            "template": {"spec": {"replicatedJobs": [{"name": "node", "template": template}]}},
        },
    }


def reprieve_runtime(
    name: str, spec: Object, *, grace_period_s: int | None = None, max_restarts: int | None = None
) -> Object:
    """The runtime of deploy/runtimes/reprieve-torch.yaml, in the namespace of the test and with the pod of the test.

    `spec`: of `pod_spec`. Its container and volumes are merged into the runtime's; the rest is the runtime's own.
    """
    runtime: Object = yaml.safe_load((ROOT / "deploy/runtimes/reprieve-torch.yaml").read_text())
    runtime["kind"], runtime["metadata"]["name"] = "TrainingRuntime", name
    jobset = runtime["spec"]["template"]["spec"]
    pod = jobset["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    ours, tests = pod["containers"][0], spec["containers"][0]
    environment = {each["name"]: each for each in [*ours["env"], *tests["env"]]}
    if grace_period_s is not None:
        pod["terminationGracePeriodSeconds"] = grace_period_s
        environment["REPRIEVE_GRACE"]["value"] = str(grace_period_s - 2)
    if max_restarts is not None:
        jobset["failurePolicy"]["maxRestarts"] = max_restarts
    mounts = [*ours["volumeMounts"], *tests["volumeMounts"]]
    pod["containers"] = [{**ours, **tests, "env": list(environment.values()), "volumeMounts": mounts}]
    pod["volumes"] += spec["volumes"]
    return runtime


def train_job(
    name: str,
    command: list[str],
    *,
    runtime: str,
    runtime_kind: str = "TrainingRuntime",
    nodes: int = 1,
    environment: dict[str, str] | None = None,
    labels: dict[str, str] | None = None,
    resources: dict[str, str] | None = None,
) -> Object:
    trainer: Object = {"numNodes": nodes, "numProcPerNode": 1, "command": command}
    # Kueue drops empty lists and objects when it starts a job. The API server refuses that: the trainer is immutable.
    if environment:
        trainer["env"] = [{"name": key, "value": value} for key, value in environment.items()]
    if resources:
        trainer["resourcesPerNode"] = {"requests": resources, "limits": resources}
    return {
        "apiVersion": TRAINER_API,
        "kind": "TrainJob",
        "metadata": {"name": name, "labels": labels or {}},
        "spec": {"runtimeRef": {"name": runtime, "kind": runtime_kind}, "trainer": trainer},
    }


def volume(namespace: str, claim: str, folder: Path) -> Object:
    """A volume for a claim of the namespace: a folder of the machine."""
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": f"{namespace}-{claim}"},
        "spec": {
            "capacity": {"storage": "20Gi"},
            "accessModes": ["ReadWriteMany", "ReadWriteOnce"],
            "claimRef": {"namespace": namespace, "name": claim},
            "hostPath": {"path": str(folder)},
        },
    }


def claim(name: str, size: str = "1Gi") -> Object:
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": name},
        "spec": {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": size}}},
    }
