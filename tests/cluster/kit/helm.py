"""The chart, with the helm of the rig: rendered on this machine, or installed on the cluster of the session."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass

from tests.cluster.kit.cluster import Cluster
from tests.cluster.rig.layout import build_output
from tests.cluster.rig.versions import KUBERNETES
from tests.support.places import ROOT

CHART = ROOT / "deploy/helm/reprieve"
RELEASE = "reprieve"
TIMEOUT_S = 180
WITHOUT_CLUSTER = f"--kube-version={KUBERNETES}"
"""Of the commands that ask no API server for its version."""


class HelmError(Exception):
    """helm ended with an error. The message is what it printed."""


@dataclass(frozen=True)
class Helm:
    """Runs helm. `command`: what stands before its arguments."""

    command: list[str]

    def run(self, *arguments: str) -> str:
        """Run a helm command and return its output."""
        done = subprocess.run([*self.command, *arguments], capture_output=True, text=True, timeout=TIMEOUT_S)
        if done.returncode:
            raise HelmError(f"helm {' '.join(arguments)}:\n{done.stdout}{done.stderr}")
        return done.stdout

    def template(self, *options: str, namespace: str) -> str:
        """Render the chart."""
        return self.run("template", RELEASE, str(CHART), WITHOUT_CLUSTER, f"--namespace={namespace}", *options)


def local_helm() -> Helm:
    """A client without a cluster."""
    return Helm([str(build_output().binary("helm"))])


def cluster_helm(cluster: Cluster) -> Helm:
    """A client of a cluster, from where that can be reached."""
    enter, kubeconfig = cluster.access
    return Helm([*enter, *local_helm().command, f"--kubeconfig={kubeconfig}"])
