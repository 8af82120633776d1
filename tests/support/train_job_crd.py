"""The resource definition of TrainJobs, as far as Reprieve looks at it, in the shape of Kubeflow Trainer 2.3."""

from __future__ import annotations

from typing import Any


def upstream_definition() -> dict[str, Any]:
    columns = [
        {"name": "State", "type": "string", "jsonPath": ".status.conditions[-1:].type"},
        {"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"},
    ]
    properties = {
        "spec": {"type": "object", "properties": {"suspend": {"type": "boolean"}}},
        "status": {"type": "object", "properties": {"conditions": {"type": "array"}}},
    }
    schema = {"openAPIV3Schema": {"type": "object", "properties": properties}}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": "trainjobs.trainer.kubeflow.org"},
        "spec": {"versions": [{"name": "v1alpha1", "schema": schema, "additionalPrinterColumns": columns}]},
    }
