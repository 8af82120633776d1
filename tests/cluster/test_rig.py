"""The cluster starts quickly and is removed completely, also when `up` was killed halfway.

The tests use a cluster of their own, beside the one of the session.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from tests.cluster.kit.machine import machine_state, processes_with
from tests.cluster.rig.layout import Instance, default_instance
from tests.cluster.rig.up import is_up
from tests.support.places import ROOT

pytestmark = [
    pytest.mark.xdist_group("rig"),
    pytest.mark.skipif(
        "REPRIEVE_TEST_KUBECONFIG" in os.environ, reason="the tests use a cluster that the rig does not start"
    ),
]
WARM_UP_S = 60


def rig(command: str, instance: Instance) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.cluster.rig", command],
        cwd=ROOT,
        env={**os.environ, "REPRIEVE_CLUSTER": instance.name},
        stderr=subprocess.PIPE,
        text=True,
    )


def run_rig_to_end(command: str, instance: Instance) -> float:
    """Run the rig, check that it succeeds, and return the seconds that it took."""
    began = time.monotonic()
    process = rig(command, instance)
    _, errors = process.communicate()
    assert process.returncode == 0, errors
    return time.monotonic() - began


@pytest.fixture
def instance() -> Iterator[Instance]:
    instance = Instance(f"{default_instance().name[:15]}-rig")
    run_rig_to_end("down", instance)
    yield instance
    run_rig_to_end("down", instance)


def test_up_is_quick_and_down_leaves_nothing(instance: Instance) -> None:
    before = machine_state(instance)
    assert run_rig_to_end("up", instance) <= WARM_UP_S
    assert is_up(instance)
    assert processes_with(instance) != []
    assert {f"network namespace {instance.network_namespace}", f"folder {instance.state}"} <= machine_state(instance)
    run_rig_to_end("down", instance)
    assert processes_with(instance) == []
    assert machine_state(instance) == before


@pytest.mark.parametrize("line", ["network and certificates made", "images imported", ": ready"])
def test_down_removes_what_a_killed_up_has_left(instance: Instance, line: str) -> None:
    before = machine_state(instance)
    process = rig("up", instance)
    assert process.stderr is not None
    assert any(line in printed for printed in process.stderr), f"`up` never got to: {line}"
    process.kill()
    process.communicate()
    assert machine_state(instance) != before
    run_rig_to_end("down", instance)
    assert processes_with(instance) == []
    assert machine_state(instance) == before


def test_down_is_harmless_without_a_cluster(instance: Instance) -> None:
    before = machine_state(instance)
    run_rig_to_end("down", instance)
    assert machine_state(instance) == before
