"""The alert rules of the chart, evaluated by Prometheus' own tool."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.cluster.kit.helm import CHART
from tests.cluster.rig.layout import build_output
from tests.support.places import FIXTURES

RULES = CHART / "files/alerts.yaml"
SCENARIOS = FIXTURES / "alerts/scenarios.yaml"

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def promtool() -> Path:
    found = build_output().binary("promtool")
    if not found.exists():
        pytest.skip("promtool is not compiled: make test-cluster-full")
    return found


def test_the_rules_are_well_formed(promtool: Path) -> None:
    check(promtool, "check", "rules", "--lint=all", "--lint-fatal", RULES)


def test_each_alert_fires_when_it_should_and_only_then(promtool: Path) -> None:
    check(promtool, "test", "rules", SCENARIOS)


def check(*command: str | Path) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
