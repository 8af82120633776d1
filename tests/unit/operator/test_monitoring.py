"""The alert rules and the dashboard of the chart: what they name exists, and what they say helps."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tests.support.operator_metrics import METRICS, TARGET_LABELS
from tests.support.places import ROOT

FILES = ROOT / "deploy/helm/reprieve/files"
RULES = [rule for group in yaml.safe_load((FILES / "alerts.yaml").read_text())["groups"] for rule in group["rules"]]
DASHBOARD = json.loads((FILES / "dashboard.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
SERIES = r"\b((?:reprieve|process)_\w+)(?:\{([^}]*)\})?"
VARIABLES = {"$namespace", "$trainjob", "$datasource", "${datasource}", "$__rate_interval", "$__all"}
STEPS = r"`(reprieve|kubectl) [^`]+`"
"""What a description must have: a command to begin with."""


def expressions() -> Iterator[tuple[str, str]]:
    """Where each expression is, and the expression."""
    for rule in RULES:
        yield rule["alert"], rule["expr"]
    for panel in PANELS:
        for target in panel["targets"]:
            yield panel["title"], target["expr"]
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["name"], variable["definition"]


EXPRESSIONS = sorted(set(expressions()))


@pytest.mark.parametrize(("where", "expression"), EXPRESSIONS, ids=[f"{where}" for where, _ in EXPRESSIONS])
def test_each_series_exists_with_these_labels(where: str, expression: str) -> None:
    found = re.findall(SERIES, expression)
    assert found, expression
    for name, selector in found:
        assert name in METRICS
        assert set(re.findall(r"(\w+)\s*[=!]", selector)) <= set(METRICS[name])
    used = {label for labels in re.findall(r"\b(?:by|on) \(([^)]*)\)", expression) for label in labels.split(", ")}
    assert used <= {*TARGET_LABELS, *(label for name, _ in found for label in METRICS[name])}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_each_alert_says_what_happened_and_what_to_do(rule: dict[str, Any]) -> None:
    assert rule["labels"]["severity"] in ("warning", "critical")
    assert rule["annotations"].keys() == {"summary", "description"}
    assert re.search(STEPS, rule["annotations"]["description"])
    for text in rule["annotations"].values():
        labels = set(re.findall(r"\$labels\.(\w+)", text))
        assert labels <= {"namespace", "trainjob"}
        assert not labels or "by (namespace, trainjob)" in rule["expr"]


def test_the_dashboard_is_laid_out() -> None:
    """Panels have an identity and a place of their own, say what they show, and use the variables that there are."""
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in panels)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(cells) == len(set(cells)), "no panel covers another one"
    assert max(x for x, _ in cells) < 24
    assert all(panel["title"] and panel["targets"] for panel in PANELS)
    assert set(re.findall(r"\$\{?\w+\}?", json.dumps(DASHBOARD))) <= VARIABLES
