"""The resource definition of TrainJob with `spec.checkpointing` and `status.trainingProgress`.

Upstream's definition stays as installed: a JSON patch adds two schemas (train_job_schema.yaml) and printer columns to
it, and another one removes them. Both are pure functions of the definition as it is stored, and empty where nothing is
to be done.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

import yaml

from reprieve.errors import ReprieveError

CRD_NAME = "trainjobs.trainer.kubeflow.org"
VERSION = "v1alpha1"
UPSTREAM_STATE = {"State": "Condition"}
"""Upstream's column `State` shows the last condition, which is Suspended for a running job that was suspended once. It
stays under another name, for jobs that ask for nothing."""

Object = dict[str, Any]


class UnknownDefinition(ReprieveError):
    """The resource definition is not the one that this version of Reprieve extends."""


def install_patch(crd: Mapping[str, Any]) -> list[Object]:
    """Return the JSON patch that adds what is missing."""
    index, version = _version(crd)
    wanted = copy.deepcopy(version)
    for part, name in _PARTS:
        _properties(wanted, part)[name] = copy.deepcopy(schema()[name])
    columns = [dict(column) for column in wanted.get("additionalPrinterColumns") or () if not _is_added(column)]
    for column in columns:
        column["name"] = UPSTREAM_STATE.get(column["name"], column["name"])
    wanted["additionalPrinterColumns"] = [*copy.deepcopy(schema()["columns"]), *columns]
    return _patch(crd, index, version, wanted)


def removal_patch(crd: Mapping[str, Any]) -> list[Object]:
    """Return the JSON patch after which the definition is upstream's again."""
    index, version = _version(crd)
    wanted = copy.deepcopy(version)
    found = wanted.get("additionalPrinterColumns") or []
    if any(_is_added(column) for column in found):
        former = {new: old for old, new in UPSTREAM_STATE.items()}
        columns = [dict(column) for column in found if not _is_added(column)]
        for column in columns:
            column["name"] = former.get(column["name"], column["name"])
        wanted["additionalPrinterColumns"] = columns
    for part, name in _PARTS:
        _properties(wanted, part).pop(name, None)
    return _patch(crd, index, version, wanted)


def missing_parts(crd: Mapping[str, Any]) -> list[str]:
    """Return what the definition lacks or has in another version, for people."""
    _, version = _version(crd)
    found = [f"{part}.{name}" for part, name in _PARTS if _properties(version, part).get(name) != schema()[name]]
    if not found and install_patch(crd):
        found.append("printer columns")
    return found


@cache
def schema() -> Object:
    """Return the two schemas and the columns. Do not change them."""
    content: Object = yaml.safe_load((files("reprieve.kubernetes") / "train_job_schema.yaml").read_text())
    return content


_PARTS = (("spec", "checkpointing"), ("status", "trainingProgress"))


def _version(crd: Mapping[str, Any]) -> tuple[int, Object]:
    for index, version in enumerate((crd.get("spec") or {}).get("versions") or ()):
        if version.get("name") == VERSION:
            return index, version
    name = (crd.get("metadata") or {}).get("name", "the resource definition")
    raise UnknownDefinition(f"{name} has no version {VERSION}: this version of Reprieve extends Kubeflow Trainer 2.3")


def _properties(version: Mapping[str, Any], part: str) -> Object:
    """The properties of `spec` or `status`."""
    properties: Object = version["schema"]["openAPIV3Schema"]["properties"][part]["properties"]
    return properties


def _is_added(column: Mapping[str, Any]) -> bool:
    return str(column.get("jsonPath", "")).startswith(".status.trainingProgress.")


def _patch(crd: Mapping[str, Any], index: int, before: Object, after: Object) -> list[Object]:
    """Return the operations from one version to the other, for the definition exactly as it was read."""
    root = f"/spec/versions/{index}"
    found: list[Object] = []
    for part, name in _PARTS:
        path = f"{root}/schema/openAPIV3Schema/properties/{part}/properties/{name}"
        old, new = _properties(before, part).get(name), _properties(after, part).get(name)
        if new is None and old is not None:
            found.append({"op": "remove", "path": path})
        elif new != old:
            found.append({"op": "add", "path": path, "value": new})
    columns = after.get("additionalPrinterColumns")
    if columns != before.get("additionalPrinterColumns"):
        found.append({"op": "add", "path": f"{root}/additionalPrinterColumns", "value": columns})
    if not found:
        return []
    revision = {"op": "test", "path": "/metadata/resourceVersion", "value": crd["metadata"]["resourceVersion"]}
    return [{"op": "test", "path": f"{root}/name", "value": VERSION}, revision, *found]
