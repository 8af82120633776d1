"""The patch of upstream's resource definition: what it adds, and that it can be taken back."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from reprieve.kubernetes import crd, plain_yaml
from reprieve.kubernetes.checkpointing import ACCESS_MODES, INTERVAL, MAX_CHECKPOINTS, SAVE_TYPES, STRATEGIES
from reprieve.kubernetes.names import MOUNT_PATH
from tests.support.golden import check_golden
from tests.support.places import ROOT

UPSTREAM: dict[str, Any] = {
    "metadata": {"name": crd.CRD_NAME, "resourceVersion": "7"},
    "spec": {
        "versions": [
            {"name": "v2alpha1"},
            {
                "name": "v1alpha1",
                "additionalPrinterColumns": [
                    {"jsonPath": ".status.conditions[-1:].type", "name": "State", "type": "string"},
                    {"jsonPath": ".metadata.creationTimestamp", "name": "Age", "type": "date"},
                ],
                "schema": {
                    "openAPIV3Schema": {
                        "properties": {
                            "spec": {"properties": {"suspend": {"type": "boolean"}}},
                            "status": {"properties": {"conditions": {"type": "array"}}},
                        }
                    }
                },
            },
        ]
    },
}
"""The parts of Trainer's definition that the patch touches."""


def patched(definition: dict[str, Any], patch: list[dict[str, Any]]) -> dict[str, Any]:
    found = copy.deepcopy(definition)
    for operation in patch:
        *path, name = operation["path"].strip("/").split("/")
        target: Any = found
        for step in path:
            target = target[int(step) if isinstance(target, list) else step]
        if operation["op"] == "test":
            assert target[name] == operation["value"]
        elif operation["op"] == "remove":
            del target[name]
        else:
            target[name] = operation["value"]
    return found


def test_installed_twice_and_removed_it_is_upstreams_again() -> None:
    installed = patched(UPSTREAM, crd.install_patch(UPSTREAM))
    assert crd.install_patch(installed) == []
    assert crd.missing_parts(installed) == []
    assert patched(installed, crd.removal_patch(installed)) == UPSTREAM
    assert crd.removal_patch(UPSTREAM) == []


def test_what_is_missing_is_named() -> None:
    assert crd.missing_parts(UPSTREAM) == ["spec.checkpointing", "status.trainingProgress"]
    installed = patched(UPSTREAM, crd.install_patch(UPSTREAM))
    installed["spec"]["versions"][1]["additionalPrinterColumns"].pop(0)
    assert crd.missing_parts(installed) == ["printer columns"]


def test_the_columns() -> None:
    installed = patched(UPSTREAM, crd.install_patch(UPSTREAM))
    version = installed["spec"]["versions"][1]
    columns = [column["name"] for column in version["additionalPrinterColumns"]]
    assert columns == ["State", "Progress", "Step", "ETA", "Updated", "Checkpoint", "Condition", "Age"]
    dates = {column["name"] for column in version["additionalPrinterColumns"] if column["type"] == "date"}
    assert dates == {"Updated", "Age"}, "kubectl shows how old the data is, also if no operator runs any more"


def test_an_older_schema_is_replaced() -> None:
    older = patched(UPSTREAM, crd.install_patch(UPSTREAM))
    properties = older["spec"]["versions"][1]["schema"]["openAPIV3Schema"]["properties"]
    properties["spec"]["properties"]["checkpointing"] = {"type": "object"}
    assert crd.install_patch(patched(older, crd.install_patch(older))) == []


def test_a_definition_without_the_version_is_refused() -> None:
    definition = {"metadata": {"name": crd.CRD_NAME}, "spec": {"versions": [{"name": "v3"}]}}
    with pytest.raises(crd.UnknownDefinition, match="has no version v1alpha1"):
        crd.install_patch(definition)


def test_every_field_is_described() -> None:
    def undescribed(schema: dict[str, Any], path: str) -> list[str]:
        found = [] if schema.get("description") or path.endswith("[]") else [path]
        for name, each in schema.get("properties", {}).items():
            found += undescribed(each, f"{path}.{name}")
        return found + (undescribed(schema["items"], f"{path}[]") if "items" in schema else [])

    assert undescribed(crd.schema()["checkpointing"], "checkpointing") == []
    assert undescribed(crd.schema()["trainingProgress"], "trainingProgress") == []


def test_the_schema_says_the_same_as_the_parser() -> None:
    fields = crd.schema()["checkpointing"]["properties"]
    assert fields["interval"]["default"] == INTERVAL
    assert fields["maxCheckpoints"]["default"] == MAX_CHECKPOINTS
    assert fields["strategy"]["enum"] == list(STRATEGIES)
    assert fields["saveType"]["enum"] == list(SAVE_TYPES)
    assert fields["storage"]["properties"]["accessMode"]["enum"] == list(ACCESS_MODES)
    assert fields["persistentVolume"]["properties"]["mountPath"]["default"] == MOUNT_PATH


def test_the_patch_file_for_kubectl_is_up_to_date() -> None:
    """deploy/crds/ has the patch for people who do not run the operator. It applies to any revision."""
    definition = copy.deepcopy(UPSTREAM)
    definition["spec"]["versions"].pop(0)
    patch = [each for each in crd.install_patch(definition) if each["path"] != "/metadata/resourceVersion"]
    head = (
        "# Adds spec.checkpointing and status.trainingProgress to Kubeflow Trainer's TrainJob, as the operator does:\n"
        "#   kubectl patch crd trainjobs.trainer.kubeflow.org --type json \\\n"
        "#     --patch-file deploy/crds/trainjobs.patch.yaml\n"
    )
    check_golden(ROOT / "deploy/crds/trainjobs.patch.yaml", head + plain_yaml.dump(patch))
