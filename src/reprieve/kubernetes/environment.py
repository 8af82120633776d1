"""The environment of the training container. What the job sets itself wins; what its runtime knows better stays."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from reprieve.errors import ConfigError
from reprieve.kubernetes.checkpointing import Checkpointing, check_environment
from reprieve.kubernetes.names import CREDENTIALS_PATH, PROGRESS_FILE, RUN_LABEL
from reprieve.kubernetes.pods import Pods

Object = dict[str, Any]

_KILL_MARGIN = timedelta(seconds=2)
"""How much earlier than the kubelet's SIGKILL the process ends by itself: 143 instead of 137, which would count."""


def add_environment(trainer: Object, settings: Checkpointing, pods: Pods) -> None:
    own = list(trainer.get("env") or ())
    names = {variable["name"] for variable in own}
    added = [variable for variable in _environment(settings, pods) if variable["name"] not in names]
    trainer["env"] = [*own, *added]
    plain = {variable["name"]: variable["value"] for variable in trainer["env"] if "value" in variable}
    check_environment(plain, "spec.checkpointing.env or spec.trainer.env")


def _environment(settings: Checkpointing, pods: Pods) -> list[Object]:
    """The variables of the training container. Those of `settings.env` replace the others."""
    values: dict[str, str | None] = {
        "CHECKPOINT_ENABLED": "true",
        "CHECKPOINT_URI": settings.uri,
        "CHECKPOINT_FALLBACK_URI": settings.folder if settings.in_object_store else None,
        "CHECKPOINT_INTERVAL": settings.interval,
        "CHECKPOINT_MAX_RETAIN": str(settings.max_checkpoints),
        "CHECKPOINT_RESUME": str(settings.resume).lower(),
        "CHECKPOINT_STRATEGY": settings.strategy or None,
        "CHECKPOINT_SAVE_TYPE": settings.save_type or None,
        "REPRIEVE_CREDENTIALS_DIR": CREDENTIALS_PATH if settings.secret else None,
        "REPRIEVE_KILL_WAIT": _seconds(settings.kill_wait),
    }
    found: dict[str, Object] = {name: {"name": name, "value": value} for name, value in values.items() if value}
    in_runtime = pods.runtime.environment if pods.runtime else set()
    defaults: dict[str, Object] = {
        "TRAINING_PROGRESS_FILE": {"value": _progress_file(settings)},
        "REPRIEVE_RUN": _field(f"metadata.labels['{RUN_LABEL}']"),
        "POD_IP": _field("status.podIP"),
    }
    found |= {name: {"name": name, **value} for name, value in defaults.items() if name not in in_runtime}
    grace_period = _grace_period(settings, pods)
    _check_kill_wait(settings, pods, grace_period)
    if grace_period:
        found["REPRIEVE_GRACE"] = {"name": "REPRIEVE_GRACE", "value": _seconds(grace_period)}
    found |= {variable["name"]: dict(variable) for variable in settings.env}
    return list(found.values())


def _grace_period(settings: Checkpointing, pods: Pods) -> timedelta | None:
    """How long the process may take after SIGTERM; None: the runtime says it, or nobody knows."""
    limit, wanted = pods.grace_period, settings.grace_period
    if limit is None:
        return wanted
    is_patched = pods.patched_grace_period is not None
    if wanted is None and not is_patched and pods.runtime and "REPRIEVE_GRACE" in pods.runtime.environment:
        return None
    text = _seconds(limit)
    if limit <= _KILL_MARGIN:
        raise ConfigError(
            f"{'spec.runtimePatches' if is_patched else f'runtime {pods.runtime_name}'}: "
            f"terminationGracePeriodSeconds is {text}, in which no pod can save: write at least 3, better 120"
        )
    if wanted is None:
        return limit - _KILL_MARGIN
    if wanted > limit:
        raise ConfigError(
            f"spec.checkpointing.gracePeriod: {_seconds(wanted)} s is more than the {text} s of runtime "
            f"{pods.runtime_name}: write at most {text}s, or raise terminationGracePeriodSeconds in the runtime"
        )
    return min(wanted, limit - _KILL_MARGIN)


def _check_kill_wait(settings: Checkpointing, pods: Pods, grace_period: timedelta | None) -> None:
    limit = grace_period or (pods.grace_period - _KILL_MARGIN if pods.grace_period is not None else None)
    if limit is not None and settings.kill_wait is not None and settings.kill_wait >= limit:
        raise ConfigError(
            f"spec.checkpointing.killWait: {_seconds(settings.kill_wait)} s leaves nothing of the grace period of "
            f"{_seconds(limit)} s to save in: write less than that"
        )


def _progress_file(settings: Checkpointing) -> str:
    return posixpath.join(settings.volume.path if settings.volume else "/tmp", PROGRESS_FILE)  # noqa: S108 - the pod's own


def _field(path: str) -> Object:
    return {"valueFrom": {"fieldRef": {"fieldPath": path}}}


def _seconds(duration: timedelta | None) -> str | None:
    return None if duration is None else f"{duration.total_seconds():.15g}"


def restore_environment(trainer: Object, old_trainer: Mapping[str, Any], settings: Checkpointing) -> None:
    added = {variable["name"] for variable in _environment(settings, Pods({}, None))} | {"REPRIEVE_GRACE"}
    env = list(trainer.get("env") or ())
    names = {variable["name"] for variable in env}
    missing = [each for each in old_trainer.get("env") or () if each["name"] in added - names]
    if missing:
        trainer["env"] = [*env, *missing]
