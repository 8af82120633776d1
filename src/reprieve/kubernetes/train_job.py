"""Turns the settings of a TrainJob into what its pods need: environment, launcher, volumes, a label.

`protect` is for a job that is being created, `restore` for one that somebody writes again: kubectl and Argo CD write
their own file, which has none of this, and Kueue writes the fields that it knows. Both are pure functions of objects.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from reprieve.errors import ConfigError
from reprieve.kubernetes.checkpointing import Checkpointing
from reprieve.kubernetes.command import LAUNCHER, TORCHTUNE, hides_launcher, starts_launcher
from reprieve.kubernetes.environment import add_environment, restore_environment
from reprieve.kubernetes.fields import Fields
from reprieve.kubernetes.names import (
    ADMISSION_MANAGER,
    CHECKPOINT_VOLUME,
    CHECKPOINTING_ANNOTATION,
    CREDENTIALS_PATH,
    CREDENTIALS_VOLUME,
    JOB_NAME_LABEL,
    RUNTIME,
    TRAINER_CONTAINER,
)
from reprieve.kubernetes.pods import Pods, check_types
from reprieve.kubernetes.runtime import Runtime
from reprieve.kubernetes.storage import is_below

Object = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ProtectedJob:
    """A TrainJob with what its settings ask for, and what its user should know."""

    job: Object
    warnings: list[str] = field(default_factory=list)


def protect(created: Mapping[str, Any], settings: Checkpointing, runtime: Runtime | None) -> ProtectedJob:
    """Return the job with everything that its pods need. What is there already stays as it is.

    `runtime`: None if it does not exist. ConfigError: the settings do not fit the job or its runtime.
    """
    check_types(Fields(created.get("spec"), "spec"))
    job: Object = copy.deepcopy(dict(created))
    annotations = job.setdefault("metadata", {}).get("annotations") or {}
    job["metadata"]["annotations"] = {**annotations, CHECKPOINTING_ANNOTATION: settings.to_yaml()}
    if not settings.enabled:
        return ProtectedJob(job)
    spec = job["spec"]
    pods = Pods(spec, runtime)
    warnings = list(_warnings(job, settings, pods))
    trainer = _without_empty(spec.get("trainer") or {})
    warnings += _add_launcher(trainer, runtime)
    add_environment(trainer, settings, pods)
    warnings += _folder_warnings(trainer, settings, pods)
    spec["trainer"] = trainer
    _add_patch(job, settings, pods)
    return ProtectedJob(job, warnings)


def label_pods(created: Mapping[str, Any], runtime: Runtime | None, *, secret: str = "") -> Object:
    """Return the job with the label of its pods, and a Secret as files, and nothing else: it is not protected."""
    job: Object = copy.deepcopy(dict(created))
    spec = job.setdefault("spec", {})
    _add_patch(job, Checkpointing(enabled=False, secret=secret), Pods(spec, runtime))
    return job


def restore(old: Mapping[str, Any], new: Mapping[str, Any], settings: Checkpointing) -> Object:
    """Return `new` with what `protect` added to `old` and another writer left out.

    Of a job that is not enabled, these are only the settings. ConfigError: `new` is not what a TrainJob looks like.
    """
    check_types(Fields(new.get("spec"), "spec"))
    job = copy.deepcopy(dict(new))
    annotations = job.setdefault("metadata", {}).get("annotations") or {}
    before = (old["metadata"].get("annotations") or {}).get(CHECKPOINTING_ANNOTATION)
    if before is not None:
        job["metadata"]["annotations"] = {**annotations, CHECKPOINTING_ANNOTATION: before}
    spec, old_spec = job["spec"], old["spec"]
    if "checkpointing" in old_spec:
        spec["checkpointing"] = copy.deepcopy(old_spec["checkpointing"])
    if not settings.enabled:
        return job
    trainer, old_trainer = _without_empty(spec.get("trainer") or {}), old_spec.get("trainer") or {}
    restore_environment(trainer, old_trainer, settings)
    command = old_trainer.get("command") or []
    if command[: len(LAUNCHER)] == list(LAUNCHER) and trainer.get("command") in (None, command[len(LAUNCHER) :]):
        trainer["command"] = list(command)
    if trainer:
        spec["trainer"] = trainer
    _restore_patch(spec, old_spec)
    return job


# The command


def _add_launcher(trainer: Object, runtime: Runtime | None) -> list[str]:
    """Put the launcher before the command, and return warnings."""
    command = list(trainer.get("command") or (runtime.command if runtime else ()))
    with_arguments = [*command, *(trainer.get("args") or (runtime.args if runtime else ()))]
    if not command:
        return [
            "reprieve: the command is unknown, because neither the job nor its runtime has one. Write "
            'spec.trainer.command: ["reprieve", "run", "--", …], unless the image starts `reprieve run --` by itself'
        ]
    if command == TORCHTUNE:
        return ["reprieve: torchtune jobs are not protected: Trainer needs their command unchanged"]
    if hides_launcher(with_arguments):
        return ["reprieve: the shell in spec.trainer.command does not forward SIGTERM: write `exec reprieve run …`"]
    if not starts_launcher(with_arguments):
        trainer["command"] = [*LAUNCHER, *command]
    return []


# Volumes and the label: one entry in runtimePatches


def _add_patch(job: Object, settings: Checkpointing, pods: Pods) -> None:
    volumes, mounts = _claim(settings, pods)
    if settings.secret and CREDENTIALS_PATH not in pods.mounts:
        name = _free_name(CREDENTIALS_VOLUME, pods.volumes)
        volumes.append({"name": name, "secret": {"secretName": settings.secret}})
        mounts.append({"name": name, "mountPath": CREDENTIALS_PATH, "readOnly": True})
    pod: Object = {}
    if name := job["metadata"].get("name"):
        pod["metadata"] = {"labels": {JOB_NAME_LABEL: name}}
    if volumes or mounts:
        pod["spec"] = {
            **({"volumes": volumes} if volumes else {}),
            "containers": [{"name": TRAINER_CONTAINER, "volumeMounts": mounts}],
        }
    if not pod:
        return
    replicated_job = {"name": pods.trainer_job, "template": {"spec": {"template": pod}}}
    entry = {
        "manager": ADMISSION_MANAGER,
        "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [replicated_job]}}},
    }
    patches = job["spec"].get("runtimePatches") or []
    own = next((patch for patch in patches if patch.get("manager") == ADMISSION_MANAGER), None)
    if own is None:
        job["spec"]["runtimePatches"] = [*patches, entry]
    else:
        own["trainingRuntimeSpec"] = entry["trainingRuntimeSpec"]


def _claim(settings: Checkpointing, pods: Pods) -> tuple[list[Object], list[Object]]:
    """The volume of the claim and its mount, as far as they are not there."""
    wanted = settings.volume
    if wanted is None:
        return [], []
    mount, volumes = pods.mounts.get(wanted.path), pods.volumes
    if mount is not None:
        source = volumes.get(mount["name"], {}).get("persistentVolumeClaim") or {}
        if source.get("claimName") == wanted.claim and (mount.get("subPath") or "") == wanted.sub_path:
            if mount.get("readOnly") or source.get("readOnly"):
                raise ConfigError(
                    f"spec.checkpointing.storage.persistentVolume.mountPath: runtime {pods.runtime_name} or "
                    f"spec.runtimePatches mounts the claim at {wanted.path} read-only: write another path"
                )
            return [], []
        raise ConfigError(
            f"spec.checkpointing.storage.persistentVolume.mountPath: volume {mount['name']} of runtime "
            f"{pods.runtime_name} or of spec.runtimePatches is already mounted at {wanted.path}: write another path"
        )
    name = _free_name(CHECKPOINT_VOLUME, volumes)
    mount = {"name": name, "mountPath": wanted.path, **({"subPath": wanted.sub_path} if wanted.sub_path else {})}
    return [{"name": name, "persistentVolumeClaim": {"claimName": wanted.claim}}], [mount]


def _free_name(name: str, used: Mapping[str, Object]) -> str:
    return name if name not in used else f"reprieve-{name}"


def _restore_patch(spec: Object, old_spec: Mapping[str, Any]) -> None:
    """Put the entry of this manager back where it was: the order of the list is compared, too."""
    old_patches = old_spec.get("runtimePatches") or []
    for index, patch in enumerate(old_patches):
        if patch.get("manager") == ADMISSION_MANAGER:
            others = [each for each in spec.get("runtimePatches") or () if each.get("manager") != ADMISSION_MANAGER]
            spec["runtimePatches"] = [*others[:index], copy.deepcopy(patch), *others[index:]]


# Warnings


def _warnings(job: Mapping[str, Any], settings: Checkpointing, pods: Pods) -> Iterable[str]:
    if not job["metadata"].get("name"):
        yield (
            f"reprieve: with generateName the name of the job is not known yet: its pods do not get the label "
            f"{JOB_NAME_LABEL}"
        )
    if settings.in_object_store:
        scheme = settings.uri.partition("://")[0]
        yield (
            f"reprieve: this version does not write to {scheme}:// yet: checkpoints go to {settings.folder} on the "
            f"claim {settings.volume.claim if settings.volume else ''}"
        )
    if pods.runtime is None:
        yield f"reprieve: runtime {pods.runtime_name} was not found: its grace period and volumes are not checked"
        return
    if not pods.runtime.restarts_preempted_jobs:
        yield (
            f"reprieve: runtime {pods.runtime_name} has no failure policy for preemptions: evicted pods may count as "
            f"failures, and start again while the old ones still save. Use runtime {RUNTIME}"
        )
    if pods.nodes > 1 and settings.access_mode in ("ReadWriteOnce", "ReadWriteOncePod"):
        yield (
            f"reprieve: {pods.nodes} nodes need a volume that all of them can mount, and accessMode is "
            f"{settings.access_mode}: use a claim with ReadWriteMany"
        )


def _folder_warnings(trainer: Mapping[str, Any], settings: Checkpointing, pods: Pods) -> Iterable[str]:
    """The folder that the environment names: the job's own CHECKPOINT_URI wins over the settings."""
    uri = next((each.get("value", "") for each in trainer["env"] if each["name"] == "CHECKPOINT_URI"), "")
    folder = settings.folder if uri == settings.uri else uri.removeprefix("file://")
    if not folder.startswith("/") or pods.runtime is None:
        return
    in_claim = settings.volume is not None and is_below(folder, settings.volume.path)
    if not in_claim and not _has_volume(folder, pods):
        yield (
            f"reprieve: no writable volume is mounted at {folder}: checkpoints are lost with the pod. Name a claim in "
            f"spec.checkpointing.storage.persistentVolume.claimName, and a folder in it"
        )


def _has_volume(folder: str, pods: Pods) -> bool:
    """Whether a folder is in a volume that outlives the pod, and can be written to."""
    paths = [path for path in pods.mounts if is_below(folder, path)]
    mount = pods.mounts[max(paths, key=len)] if paths else None
    return mount is not None and not mount.get("readOnly") and "emptyDir" not in pods.volumes.get(mount["name"], {})


def _without_empty(trainer: Mapping[str, Any]) -> Object:
    """Leave out empty lists, objects and values: Kueue drops them when it starts a job, and the API server refuses
    that, because the trainer of a job is immutable."""
    kept = {name: value for name, value in trainer.items() if value not in ([], {}, None)}
    if env := kept.get("env"):
        kept["env"] = [{key: value for key, value in each.items() if value not in ("", None, {})} for each in env]
    return kept
