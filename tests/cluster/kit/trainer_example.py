"""examples/trainer as users have it: its image, its manifests and its commands, against the cluster of the test.

The image is built without torch, which is mounted from this machine, as are transformers and what it needs. Manifests
are changed for that and for the folder behind their volume claim, and not otherwise.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.cluster.kit.cluster import Cluster
from tests.cluster.kit.images import built_image
from tests.cluster.kit.objects import HOST_PYTHON, Object, host_folders, mount, pod_spec
from tests.cluster.rig.kubectl import Kubectl
from tests.support.places import HIDE_OPTIONAL, ROOT, SITE

EXAMPLES = ROOT / "examples"
IMAGE = "quay.io/oriedge/trainer-huggingface:test"
JOB = "ftjb"
FINETUNE = {"TESTS_HIDE": "cuda deepspeed sklearn triton"}
"""In the environment of a pod that fine-tunes: it needs peft and datasets."""
IMAGE_PYTHON = (3, 11)
"""Of Debian 12, which is in the image. Packages that are mounted into it must be for the same Python."""
PACKAGES = sysconfig.get_path("purelib")


@contextmanager
def example_image(extras: str = "") -> Iterator[Path]:
    """Build the image of the example, and return its archive.

    `extras` of the wheel, such as `[finetune]`, come with torch, which is then copied into the image.
    """
    assert sys.version_info[:2] == IMAGE_PYTHON, f"these tests need Python {IMAGE_PYTHON}, as in the image"
    with built_image(EXAMPLES / "trainer", IMAGE, extras) as builder:
        yield builder.archive(IMAGE)


def make_inputs(folder: Path) -> None:
    """Make a model and data for a fine-tuning, where nothing can be downloaded."""
    subprocess.run([sys.executable, EXAMPLES / "finetune/make_tiny.py", folder], cwd=ROOT, check=True)
    subprocess.run(["chmod", "-R", "a+rwX", folder], check=True)  # for pods of other users


def pod_environment(environment: dict[str, str] | None = None) -> dict[str, str]:
    """Packages of this machine, and the Reprieve of the image: it is installed here as a link to the checkout only."""
    variables = {**HOST_PYTHON, **HIDE_OPTIONAL, "PYTHONPATH": f"{SITE}:{PACKAGES}", "HF_HUB_OFFLINE": "1"}
    return {**variables, **(environment or {})}


def image_pod(
    *arguments: str, folder: Path, environment: dict[str, str] | None = None, security: dict[str, Any] | None = None
) -> Object:
    """A pod that runs the image with these arguments, without a volume for /tmp."""
    spec = pod_spec(
        container="pytorch", with_host_python=True, folders=[folder], environment=pod_environment(environment)
    )
    changes = {"image": IMAGE, "args": list(arguments), "securityContext": security or {}}
    spec["containers"][0].update(changes)
    return spec


@dataclass
class TrainerExample:
    """A copy of examples/ for one test, and its namespace."""

    cluster: Cluster
    namespace: Kubectl
    folder: Path
    """Where the copy is. The pods have its folder `workspace` as /workspace."""

    def __post_init__(self) -> None:
        shutil.copytree(EXAMPLES / "trainer", self.folder / "trainer", ignore=shutil.ignore_patterns(".env", "wheels"))
        self.workspace.mkdir(mode=0o777)
        self.workspace.chmod(0o777)
        programs = self.folder / "bin"
        programs.mkdir()
        command = " ".join(self.namespace.arguments())
        (programs / "kubectl").write_text(f'#!/bin/sh\nexec {command} "$@"\n')
        (programs / "kubectl").chmod(0o755)
        self.environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "KUBECONFIG": "kubeConfig.yaml"}

    @property
    def workspace(self) -> Path:
        return self.folder / "workspace"

    def start(self, command: str) -> subprocess.Popen[bytes]:
        """Start a command of the README, as in a terminal of its own."""
        null = subprocess.DEVNULL
        return subprocess.Popen(
            ["bash", "-c", command], cwd=self.folder, env=self.environment, stdin=null, stdout=null, stderr=null
        )

    def run(self, command: str, *, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run a command of the README in the folder that it is meant for, examples/."""
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert not check or done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return done

    def create_secret(self) -> None:
        (self.folder / "trainer/.env").write_text("HF_TOKEN=hf_test\n")
        self.run("cd trainer/ && ./setup-env.sh")

    def deploy(
        self,
        manifest: str,
        *,
        command: list[str] | None = None,
        folders: list[Path] | None = None,
        environment: dict[str, str] | None = None,
        config: dict[str, str] | None = None,
    ) -> None:
        """Apply a manifest of the example. `command` replaces what its containers run, `config` is for its ConfigMap,
        and `folders` of this machine are mounted, writable."""
        path = self.folder / "trainer" / manifest
        # Through JSON, because the pods of a job share parts by anchors.
        objects = json.loads(json.dumps(list(yaml.safe_load_all(path.read_text()))))
        for each in objects:
            if each["kind"] == "ConfigMap":
                each["data"] |= config or {}
            elif each["kind"] == "PersistentVolumeClaim":
                self.namespace.apply(self._volume(each["metadata"]["name"]))
            elif each["kind"] == "PyTorchJob":
                for replica in each["spec"]["pytorchReplicaSpecs"].values():
                    self._adapt(replica["template"]["spec"], command, folders or [], environment or {})
        path.write_text("\n---\n".join(json.dumps(each) for each in objects))  # PyYAML leaves 2e-2 without quotes
        self.run(f"kubectl apply -f trainer/{manifest}")

    def _volume(self, claim: str) -> Object:
        return {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": f"{self.namespace.namespace}-{claim}"},
            "spec": {
                "accessModes": ["ReadWriteMany"],
                "capacity": {"storage": "50Gi"},
                "claimRef": {"namespace": self.namespace.namespace, "name": claim},
                "hostPath": {"path": str(self.workspace)},
                "persistentVolumeReclaimPolicy": "Retain",
                "storageClassName": "",
            },
        }

    def _adapt(
        self, spec: dict[str, Any], command: list[str] | None, folders: list[Path], environment: dict[str, str]
    ) -> None:
        spec.pop("initContainers", None)  # downloads
        [container] = spec["containers"]
        mounts = [mount(f"host-{number}", path, read_only=True) for number, path in enumerate(host_folders())]
        mounts += [mount(f"folder-{number}", path) for number, path in enumerate(folders)]
        variables = pod_environment(environment)
        given = {name: {"name": name, "value": value} for name, value in variables.items()}
        container["env"] = [*(each for each in container["env"] if each["name"] not in given), *given.values()]
        container["volumeMounts"] += [mounted for _, mounted in mounts]
        spec["volumes"] += [volume for volume, _ in mounts]
        if command is not None:
            container["args"] = command

    def close(self) -> None:
        self.namespace.delete("pytorchjob", JOB, wait=False)
        self.cluster.kubectl.run(
            *("delete", "persistentvolume", f"{self.namespace.namespace}-{JOB}-workspace", "--ignore-not-found"),
            "--wait=false",
        )
