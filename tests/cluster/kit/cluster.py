"""The cluster that a test session uses: the rig's own, or the one that `REPRIEVE_TEST_KUBECONFIG` names.

Sessions share a running cluster. Whoever starts it for tests marks it; the last session that ends removes it, unless
`make cluster-up` had started it or `REPRIEVE_KEEP_CLUSTER=1` keeps it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from tests.cluster.rig.cgroups import find_processes
from tests.cluster.rig.kubectl import Kubectl, has_condition
from tests.cluster.rig.layout import CACHE, Instance, build_output, default_instance
from tests.cluster.rig.prerequisites import find_command
from tests.cluster.rig.up import cluster_kubectl, is_up
from tests.support.places import ROOT

STARTED_BY_TESTS = "started-by-tests"


@dataclass(frozen=True)
class Cluster:
    """A cluster that is up. `instance` is None if it is not the rig's."""

    kubectl: Kubectl
    instance: Instance | None

    @property
    def nodes(self) -> list[str]:
        return [node["metadata"]["name"] for node in self.kubectl.list("nodes")]

    @contextlib.contextmanager
    def frozen_kubelet(self, node: str) -> Iterator[None]:
        """Stop the kubelet of a node for a while: the node becomes NotReady after 50 s, its pods run on."""
        assert self.instance is not None, "only the kubelets of the rig can be frozen"
        (kubelet,) = find_processes(self.instance, "kubelet", f"--hostname-override={node}")
        os.kill(kubelet, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(kubelet, signal.SIGCONT)
            self.kubectl.wait_for("node", node, has_condition("Ready"))


@contextlib.contextmanager
def session_cluster(*, full: bool) -> Iterator[Cluster]:
    """Give a test session its cluster, and remove it afterwards if nobody else uses it."""
    if path := os.environ.get("REPRIEVE_TEST_KUBECONFIG"):
        kubectl = find_command("kubectl") or str(build_output().binary("kubectl"))
        yield Cluster(Kubectl([kubectl, f"--kubeconfig={path}"]), None)
        return
    instance = default_instance()
    CACHE.mkdir(parents=True, exist_ok=True)
    with instance.users.open("w") as users:
        fcntl.flock(users, fcntl.LOCK_SH)
        was_up = is_up(instance)
        run_rig("up", *(["--full"] if full else []))
        if not was_up:
            (instance.state / STARTED_BY_TESTS).touch()
        yield Cluster(cluster_kubectl(instance, build_output()), instance)
        keep = os.environ.get("REPRIEVE_KEEP_CLUSTER") == "1" or not (instance.state / STARTED_BY_TESTS).exists()
        if not keep and _is_last_user(users.fileno()):
            run_rig("down")


def run_rig(*arguments: str) -> None:
    """Run the rig in a process of its own: it enters the cgroup of the cluster."""
    subprocess.run([sys.executable, "-m", "tests.cluster.rig", *arguments], cwd=ROOT, check=True)


def _is_last_user(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
