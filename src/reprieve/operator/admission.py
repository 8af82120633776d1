"""Decides about one TrainJob: what to add to it, what its user should know, or why it is refused.

Pure: an AdmissionReview goes in, and one comes out. The server around it (webhook_server.py) fetches the runtime that
the job names.

    CREATE   settings from the field or the annotation, checked → annotation, environment, launcher, volumes
    UPDATE   another writer's version of the job → the same, with what it left out
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from typing import Any

from reprieve.errors import ConfigError
from reprieve.kubernetes import checkpointing
from reprieve.kubernetes.checkpointing import Checkpointing
from reprieve.kubernetes.fields import Fields
from reprieve.kubernetes.names import CHECKPOINTING_ANNOTATION
from reprieve.kubernetes.pods import check_types
from reprieve.kubernetes.runtime import Runtime, RuntimeReference
from reprieve.kubernetes.train_job import protect, restore

FIELD = "spec.checkpointing"
ANNOTATION = f"annotation {CHECKPOINTING_ANNOTATION}"
DEFAULT_RUNTIME_KIND = "ClusterTrainingRuntime"

_MAX_WARNING_LENGTH = 256
"""Longer ones may be cut by the API server, and all of them together at 4096."""

Object = dict[str, Any]


def runtime_of(review: Mapping[str, Any]) -> RuntimeReference | None:
    """Return the runtime that a decision needs, or None if it needs none."""
    request = review.get("request") or {}
    try:
        reference = Fields(request.get("object"), "object").child("spec", "runtimeRef")
        name, kind = reference.object_name("name"), reference.string("kind") or DEFAULT_RUNTIME_KIND
    except ConfigError:
        return None  # `respond` refuses the job.
    if request.get("operation") != "CREATE" or not name:
        return None
    namespace = "" if kind == DEFAULT_RUNTIME_KIND else str(request.get("namespace", ""))
    return RuntimeReference(kind, name, namespace)


def respond(review: Mapping[str, Any], runtime: Mapping[str, Any] | None) -> Object:
    """Return the review with a response. `runtime`: the one of `runtime_of`, or None if it does not exist."""
    request = review.get("request") or {}
    response: Object = {"uid": request.get("uid", ""), "allowed": True}
    job = request.get("object") or {}
    try:
        changed, warnings = _decide(request, Runtime(runtime) if runtime is not None else None)
        operations = _operations(job, changed)
        patch = json.dumps(operations)
    except (ConfigError, RecursionError) as error:
        message = str(error) if isinstance(error, ConfigError) else "the TrainJob is nested too deeply"
        response |= {"allowed": False, "status": {"code": 422, "reason": "Invalid", "message": message}}
    else:
        if operations:
            response |= {"patchType": "JSONPatch", "patch": base64.b64encode(patch.encode()).decode()}
        if warnings:
            response["warnings"] = [warning[:_MAX_WARNING_LENGTH] for warning in warnings]
    return {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": response}


def _decide(request: Mapping[str, Any], runtime: Runtime | None) -> tuple[Object, list[str]]:
    job = Fields(request.get("object"), "object").values
    if request.get("operation") == "CREATE":
        settings = _settings(job)
        if settings is None or not settings.enabled:
            return job, []
        found = protect(job, settings, runtime)
        return found.job, found.warnings
    if request.get("operation") == "UPDATE":
        return _decide_update(request.get("oldObject") or {}, job), []
    return job, []


def _decide_update(old: Object, new: Object) -> Object:
    """Settings cannot change: the pods, the operator and a rerun of the job rely on them."""
    try:
        before = _settings(old)
        check_types(Fields(old.get("spec"), "spec"))
    except ConfigError:
        return new  # Of a newer version of the operator. Refusing would keep Kueue from stopping the job.
    for where, settings in _sources(new).items():
        if before is None and settings.enabled:
            raise ConfigError(f"{where}: a job can only be given settings when it is created: create it again")
        if before is not None and settings != before:
            raise ConfigError(f"{where}: the settings of a job cannot change: delete it and create it again")
    return restore(old, new, before) if before is not None else new


def _settings(job: Mapping[str, Any]) -> Checkpointing | None:
    """Return what the job asks for, or None if it asks for nothing."""
    found = list(_sources(job).values())
    if len(found) == 2 and found[0] != found[1]:
        raise ConfigError(f"{FIELD} and the {ANNOTATION} disagree: keep one of the two")
    return found[0] if found else None


def _sources(job: Mapping[str, Any]) -> dict[str, Checkpointing]:
    """Return the settings by where they are: in the field, in the annotation, or in both."""
    field = Fields(job.get("spec"), "spec").values.get("checkpointing")
    annotations = Fields(job.get("metadata"), "metadata").child("annotations")
    found = {}
    if field is not None:
        found[FIELD] = checkpointing.parse(field, FIELD)
    if annotations.values.get(CHECKPOINTING_ANNOTATION) is not None:
        found[ANNOTATION] = checkpointing.from_yaml(annotations.string(CHECKPOINTING_ANNOTATION), ANNOTATION)
    return found


def _operations(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Object]:
    """Return the JSON patch. It replaces the few fields that `protect` and `restore` change, as a whole."""
    found: list[Object] = []
    if before.get("metadata") != after.get("metadata"):
        found.append(_replace("/metadata/annotations", after["metadata"].get("annotations")))
    old, new = before.get("spec") or {}, after.get("spec") or {}
    changed = [name for name in ("checkpointing", "trainer", "runtimePatches") if old.get(name) != new.get(name)]
    return found + [_replace(f"/spec/{name}", new.get(name)) for name in changed]


def _replace(path: str, value: object) -> Object:
    """`add` replaces a member that is there."""
    return {"op": "add", "path": path, "value": value}
