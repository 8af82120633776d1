"""A node in a container: `ray start --block` below a shell that is PID 1. SIGTERM to it, as at a pod's deletion."""

from __future__ import annotations

import os
import shlex
import signal
from collections.abc import Callable

import pytest
import yaml

from tests.support.places import ROOT
from tests.support.ray_lab import RayLab

pytestmark = [pytest.mark.timeout(600), pytest.mark.root]

KUBERAY = "ulimit -n 65536; {}"
"""The command that KubeRay gives to its containers."""


def manifest(command: str) -> str:
    """The command of the containers in our manifest, with KubeRay's variable in it."""
    with (ROOT / "deploy" / "ray" / "rayjob.yaml").open() as file:
        job = yaml.safe_load(file)
    container = job["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["template"]["spec"]["containers"][0]
    assert container["command"] == ["/bin/bash", "-c", "--"]
    return f"export KUBERAY_GEN_RAY_START_CMD={shlex.quote(command)}; {container['args'][0]}"


@pytest.mark.parametrize("shell", [manifest, KUBERAY.format], ids=["our manifest", "KubeRay's own command"])
def test_a_deleted_pod_loses_nothing(lab: RayLab, shell: Callable[[str], str]) -> None:
    first_process = lab.add_node(resource := lab.room(), shell=shell)
    driver = lab.start(steps=600, step_s=0.2, steps_after=3, resource=resource, every=1000)
    lab.wait_for_step(3)
    os.kill(first_process, signal.SIGTERM)
    ended = lab.wait(driver)
    assert ended.code == 0, str(ended)
    assert len(lab.starts()) == 2, str(ended)
    lab.assert_nothing_lost(lab.starts()[1] + 3, 2)
    assert "a node of the run is drained" in ended.output
    assert lab.failures_counted() == 0


def test_a_shell_that_has_more_to_do_does_not_pass_the_signal_on(lab: RayLab) -> None:
    """Why the manifest says `exec`: as PID 1, a shell that waits for `ray start` ignores SIGTERM."""
    first_process = lab.add_node("unused", shell=lambda command: f"{command}; echo ended")
    os.kill(first_process, signal.SIGTERM)
    with pytest.raises(AssertionError, match="not within"):
        lab.until(lambda: "received SIGTERM" in (lab.folder / "node-0.log").read_text(), "a drain", limit_s=5)
