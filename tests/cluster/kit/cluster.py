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
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.rig import network
from tests.cluster.rig.cgroups import find_processes
from tests.cluster.rig.controllers import READY_WITHIN_S, controllers, wait_until_ready
from tests.cluster.rig.kubectl import Kubectl, has_condition
from tests.cluster.rig.layout import CACHE, Instance, build_output, default_instance
from tests.cluster.rig.prerequisites import find_command
from tests.cluster.rig.up import cluster_kubectl, is_up
from tests.support.places import ROOT

STARTED_BY_TESTS = "started-by-tests"
OTHER_CLUSTER = "REPRIEVE_TEST_KUBECONFIG"
NODE_LOST_WITHIN_S = 50
"""After which a node counts as lost of which nothing was heard."""
START_AGAIN = """\
import os, sys
from tests.cluster.rig import cgroups, layout
cgroups.enter(layout.Instance(sys.argv[1]))
os.execv(sys.argv[2], sys.argv[2:])
"""


@dataclass(frozen=True)
class Cluster:
    """A cluster that is up. `instance` is None if it is not the rig's."""

    kubectl: Kubectl
    instance: Instance | None

    @property
    def nodes(self) -> list[str]:
        return [node["metadata"]["name"] for node in self.kubectl.list("nodes")]

    @property
    def access(self) -> tuple[list[str], str]:
        """What a command begins with to reach the cluster, and the kubeconfig that it needs."""
        if self.instance is None:
            return [], os.environ[OTHER_CLUSTER]
        return network.inside(self.instance), str(self.instance.admin_kubeconfig)

    def run(self, *command: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        """Run a program of this machine that finds the cluster by KUBECONFIG."""
        enter, kubeconfig = self.access
        environment = {**os.environ, "KUBECONFIG": kubeconfig}
        return subprocess.run([*enter, *command], env=environment, input=stdin, capture_output=True, text=True)

    def own_instance(self) -> Instance:
        """The rig's cluster; a test that needs what only the rig has is skipped on others."""
        if self.instance is None:
            pytest.skip(f"{OTHER_CLUSTER} names a cluster that is not the rig's")
        return self.instance

    @contextlib.contextmanager
    def frozen_kubelet(self, node: str) -> Iterator[None]:
        """Stop the kubelet of a node for a while: the node becomes NotReady after 50 s, its pods run on. It may take a
        while to be ready again."""
        (kubelet,) = find_processes(self.own_instance(), "kubelet", f"--hostname-override={node}")
        os.kill(kubelet, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(kubelet, signal.SIGCONT)

    def wait_until_controllers_are_ready(self) -> None:
        """They end when they cannot renew their leases, and start again. That an API server which has just come back
        calls them ready is what it knew before, until the kubelets reach it again. The node controller may reach it
        later than they do, and then calls the nodes lost for a moment, and all their pods with them."""
        deadline = time.monotonic() + READY_WITHIN_S
        while not self.kubectl.succeeds("get", "--raw", "/readyz"):
            assert time.monotonic() < deadline, "the API server is not ready"
            time.sleep(0.5)
        back = datetime.now(timezone.utc)
        leases = self.kubectl.for_namespace("kube-node-lease")
        for node in self.nodes:
            leases.wait_for("lease", node, lambda lease: _renewed(lease) > back, timeout_s=READY_WITHIN_S)
        time.sleep(NODE_LOST_WITHIN_S)
        for node in self.nodes:
            self.kubectl.wait_for("node", node, has_condition("Ready"), timeout_s=READY_WITHIN_S)
        for controller in controllers(full=True):
            if self.kubectl.succeeds("get", "namespace", controller.namespace):
                wait_until_ready(controller, self.kubectl)

    @contextlib.contextmanager
    def without(self, program: str, argument: str) -> Iterator[None]:
        """Kill a program of the rig, such as a kubelet, and start it again after the block as it was."""
        instance = self.own_instance()
        (pid,) = find_processes(instance, program, argument)
        folder = Path(f"/proc/{pid}")
        command = folder.joinpath("cmdline").read_bytes().decode().split("\0")[:-1]
        environment = dict(each.split("=", 1) for each in folder.joinpath("environ").read_text().split("\0") if each)
        directory = folder.joinpath("cwd").readlink()
        with contextlib.ExitStack() as stack:
            spaces = [stack.enter_context(folder.joinpath("ns", name).open()) for name in ("net", "mnt")]
            log = stack.enter_context((instance.logs / f"{program}-again.log").open("ab"))
            os.kill(pid, signal.SIGKILL)
            yield
            net, mount = (f"/proc/self/fd/{file.fileno()}" for file in spaces)
            enter = [
                find_command("nsenter") or "nsenter",
                f"--net={net}",
                f"--mount={mount}",
                f"--wd={directory}",
                "--",
            ]
            subprocess.run(
                ["setsid", "--fork", sys.executable, "-c", START_AGAIN, instance.name, *enter, *command],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=[file.fileno() for file in spaces],
                check=True,
            )


def _renewed(lease: dict[str, Any]) -> datetime:
    return datetime.fromisoformat(lease["spec"]["renewTime"].replace("Z", "+00:00"))


@contextlib.contextmanager
def session_cluster(*, full: bool) -> Iterator[Cluster]:
    """Give a test session its cluster, and remove it afterwards if nobody else uses it."""
    if path := os.environ.get(OTHER_CLUSTER):
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
