"""The values of the chart, and what is released together with it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import yaml

import reprieve
from tests.support.places import ROOT

CHART = ROOT / "deploy/helm/reprieve"
OPEN = {"labels", "requests", "limits"}
"""Values that are objects."""


def paths(values: dict[str, Any], schema: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Each value, by its path, and whether the schema or the values do not know it."""
    properties = schema.get("properties")
    if properties is None:
        return
    for name in values.keys() | properties.keys():
        path = f"{prefix}{name}"
        if name not in properties:
            yield path, "is not in the schema"
        elif name not in values:
            yield path, "has no default"
        elif isinstance(values[name], dict):
            yield from paths(values[name], properties[name], f"{path}.")


def open_objects(schema: dict[str, Any], path: str = "") -> Iterator[str]:
    """The objects of the schema that accept names that they do not list."""
    if "properties" in schema:
        if schema.get("additionalProperties") is not False:
            yield path
        for name, each in schema["properties"].items():
            yield from open_objects(each, f"{path}.{name}")


def test_schema_and_values_agree() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    schema = json.loads((CHART / "values.schema.json").read_text())
    # `global` comes from a chart that this one is part of; `claims` of the resources are for those who need them.
    assert set(paths(values, schema)) == {("global", "has no default"), ("resources.claims", "has no default")}
    assert list(open_objects(schema)) == []


def test_the_operator_may_do_what_its_code_does_and_nothing_else() -> None:
    objects = list(yaml.safe_load_all((ROOT / "deploy/install.yaml").read_text()))
    roles = [each for each in objects if each["kind"] in ("ClusterRole", "Role")]
    rules = [rule for role in roles if role["metadata"]["name"] == "reprieve-operator" for rule in role["rules"]]
    found = sorted((each, ", ".join(rule["verbs"])) for rule in rules for each in rule["resources"])
    assert found == [
        ("clustertrainingruntimes", "get"),
        ("customresourcedefinitions", "get, list, watch, patch"),
        ("events", "create"),
        ("leases", "create"),
        ("leases", "get, update"),
        ("mutatingwebhookconfigurations", "get, patch"),
        ("pods", "list, watch"),
        ("secrets", "create"),
        ("secrets", "get, update"),
        ("trainingruntimes", "get"),
        ("trainjobs", "get, list, watch, patch"),
        ("trainjobs/status", "patch"),
        ("workloads", "list, patch"),
    ]
    named = {"customresourcedefinitions", "mutatingwebhookconfigurations"}
    for rule in rules:
        is_named = "resourceNames" in rule
        assert is_named == (not named.isdisjoint(rule["resources"]) or "update" in rule["verbs"]), rule


def leaves(values: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in values.items():
        is_branch = isinstance(value, dict) and value and name not in OPEN
        yield from leaves(value, f"{prefix}{name}.") if is_branch else [f"{prefix}{name}"]


def test_the_docs_list_every_value() -> None:
    """In the first column: `a.b`, and after it `.c` for `a.c`."""
    table = (ROOT / "docs/operator.md").read_text().partition("\n## Values\n")[2].partition("\n## ")[0]
    listed = []
    for cell in re.findall(r"^\| (`[^|]*) \|", table, re.MULTILINE):
        for name in re.findall(r"`([^`]+)`", cell):
            listed.append(f"{listed[-1].rpartition('.')[0]}{name}" if name.startswith(".") else name)
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert sorted(listed) == sorted(leaves(values))


def test_only_pods_of_a_monitoring_reach_the_metrics() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    objects = yaml.safe_load_all((ROOT / "deploy/install.yaml").read_text())
    [policy] = [each for each in objects if each["kind"] == "NetworkPolicy"]
    webhook, metrics = policy["spec"]["ingress"]
    assert webhook == {"ports": [{"port": "webhook"}]}
    assert metrics["from"] == values["networkPolicy"]["metricsFrom"]
    assert all(peer.get("podSelector") for peer in metrics["from"])


def test_the_chart_has_the_version_of_the_package() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == reprieve.__version__
    dockerfile = (ROOT / "deploy/images/operator/Dockerfile").read_text()
    assert f"ghcr.io/reprieve/operator:{reprieve.__version__} " in dockerfile
