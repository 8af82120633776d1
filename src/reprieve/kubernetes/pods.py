"""The pods of a TrainJob as its runtime and the patches of others describe them, before Reprieve adds anything."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from reprieve.errors import ConfigError
from reprieve.kubernetes.fields import Fields
from reprieve.kubernetes.names import ADMISSION_MANAGER, TRAINER_CONTAINER, TRAINER_JOB
from reprieve.kubernetes.runtime import Runtime, grace_period_of, patched_pods

Object = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Pods:
    """The pods of a job, before anything is added to them."""

    spec: Mapping[str, Any]
    runtime: Runtime | None

    @property
    def patches(self) -> list[Object]:
        """The patches that other managers made."""
        found = self.spec.get("runtimePatches") or ()
        return [patch for patch in found if patch.get("manager") != ADMISSION_MANAGER]

    @property
    def runtime_name(self) -> str:
        return str((self.spec.get("runtimeRef") or {}).get("name", ""))

    @property
    def trainer_job(self) -> str:
        """The name of the replicated job that trains."""
        return self.runtime.trainer_job if self.runtime else TRAINER_JOB

    @property
    def nodes(self) -> int:
        nodes = Fields(self.spec, "spec").child("trainer").integer_or_none("numNodes")
        return nodes or (self.runtime.nodes if self.runtime else 1)

    @property
    def volumes(self) -> dict[str, Object]:
        found = [*(self.runtime.volumes if self.runtime else ())]
        found += [volume for pod in self._patched for volume in pod.get("volumes") or ()]
        return {volume["name"]: volume for volume in found}

    @property
    def mounts(self) -> dict[str, Object]:
        """The mounts of the training container, by their path."""
        found = [*(self.runtime.mounts if self.runtime else ())]
        for pod in self._patched:
            for container in pod.get("containers") or ():
                if container.get("name") == TRAINER_CONTAINER:
                    found += container.get("volumeMounts") or ()
        return {posixpath.normpath(mount["mountPath"]): mount for mount in found}

    @property
    def patched_grace_period(self) -> timedelta | None:
        """Where a patch sets it. With Kueue, that makes trouble (docs/kubernetes.md), but is not ours to change."""
        found = [period for pod in self._patched if (period := grace_period_of(pod)) is not None]
        return found[-1] if found else None

    @property
    def grace_period(self) -> timedelta | None:
        """From SIGTERM until the kubelet's SIGKILL; None: unknown."""
        if (patched := self.patched_grace_period) is not None:
            return patched
        return self.runtime.grace_period if self.runtime else None

    @property
    def _patched(self) -> list[Object]:
        return list(patched_pods(self.patches, self.trainer_job))


def check_types(spec: Fields) -> None:
    """Raise ConfigError where a part of a TrainJob that is read here has another type than in the schema.

    Admission comes before the API server's own check, and must neither fail on such a job nor make a valid one of it.
    """
    if not spec.values:
        raise ConfigError(f"{spec.where}: there is none: write runtimeRef.name")
    spec.child("runtimeRef").object_name("name")
    trainer = spec.child("trainer")
    for name in ("command", "args"):
        trainer.strings(name)
    for variable in trainer.items("env"):
        variable.string("name", is_required=True)
        variable.string("value")
        variable.child("valueFrom")
    trainer.integer_or_none("numNodes")
    for patch in spec.items("runtimePatches"):
        patch.string("manager", is_required=True)
        for job in patch.child("trainingRuntimeSpec", "template", "spec").items("replicatedJobs"):
            job.string("name", is_required=True)
            _check_pod(job.child("template", "spec", "template", "spec"))


def _check_pod(pod: Fields) -> None:
    pod.integer_or_none("terminationGracePeriodSeconds")
    for volume in pod.items("volumes"):
        volume.string("name", is_required=True)
        volume.child("persistentVolumeClaim").string("claimName")
    for container in pod.items("containers"):
        container.string("name", is_required=True)
        for mount in container.items("volumeMounts"):
            mount.string("name", is_required=True)
            mount.string("mountPath", is_required=True)
            mount.string("subPath")
