"""`up`: starts a cluster and waits until it runs jobs.

The order follows what each part needs: while etcd and the API server start, the nodes import images; the kubelets need
the API server; the controllers need nodes. A cluster that is up already is left alone, but for controllers that it
lacks.
"""

from __future__ import annotations

import fcntl
import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.cluster.rig import cgroups, network
from tests.cluster.rig.builder.parts import build
from tests.cluster.rig.certificates import Certificates
from tests.cluster.rig.console import report
from tests.cluster.rig.control_plane import ControlPlane
from tests.cluster.rig.controllers import KUEUE, Controller, controllers, install, wait_until_ready
from tests.cluster.rig.down import remove_cluster
from tests.cluster.rig.kubectl import Kubectl, has_condition
from tests.cluster.rig.layout import BuildOutput, Instance, build_output, part_names
from tests.cluster.rig.network import API_SERVICE_ADDRESS, NODE_ADDRESSES
from tests.cluster.rig.nodes import Node
from tests.cluster.rig.prerequisites import check_machine
from tests.cluster.rig.processes import Processes

API_WITHIN_S = 60
NODE_WITHIN_S = 60


def start(instance: Instance, *, full: bool) -> None:
    """Bring a cluster up; with `full` including Kueue."""
    build(full=full)
    check_machine()
    output = build_output()
    kubectl = cluster_kubectl(instance, output)
    with instance.lock.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        began = time.monotonic()
        if not is_up(instance):
            remove_cluster(instance)
            cgroups.enter(instance)
            _start_cluster(instance, output, kubectl)
        _install_controllers(instance, output, kubectl, full=full)
        report(f"cluster {instance.name}: up in {time.monotonic() - began:.1f} s")


def cluster_kubectl(instance: Instance, output: BuildOutput) -> Kubectl:
    kubectl = str(output.binary("kubectl"))
    return Kubectl([*network.inside(instance), kubectl, f"--kubeconfig={instance.admin_kubeconfig}"])


def is_up(instance: Instance) -> bool:
    """Whether the cluster was started completely and answers."""
    return (instance.state / "started").exists() and cluster_kubectl(instance, build_output()).succeeds(
        "get", "--raw", "/readyz"
    )


def _start_cluster(instance: Instance, output: BuildOutput, kubectl: Kubectl) -> None:
    instance.state.mkdir(parents=True)
    network.create(instance)
    certificates = Certificates(instance)
    certificates.create()
    report("network and certificates made")
    processes = Processes(instance)
    control_plane = ControlPlane(instance, output, certificates, processes)
    nodes = _nodes(instance, output, processes)
    control_plane.start_api()
    for node in nodes:
        node.start_containerd()
    for node in nodes:
        processes.wait_until(f"containerd of {node.name} answers", node.containerd_answers, timeout_s=30)
    with ThreadPoolExecutor() as pool:
        imports = [pool.submit(node.import_images, part_names(full=False)) for node in nodes]
        processes.wait_until(
            "the API server answers", lambda: kubectl.succeeds("get", "--raw", "/readyz"), timeout_s=API_WITHIN_S
        )
        report("API server answers")
        control_plane.start_controllers()
        control_plane.start_dns(kubectl)
        for each in imports:
            each.result()
    report("images imported")
    for node in nodes:
        node.start_kubelet(certificates)
    processes.wait_until("all nodes are ready", lambda: _nodes_are_ready(kubectl), timeout_s=NODE_WITHIN_S)
    report("nodes ready")
    control_plane.start_proxy()
    processes.wait_until(
        "pods can reach the API server", lambda: _service_address_answers(kubectl), timeout_s=API_WITHIN_S
    )
    (instance.state / "started").touch()
    report("services ready")


def import_image(instance: Instance, archive: Path) -> None:
    """Give an image of a test to all nodes of a running cluster."""
    for node in _nodes(instance, build_output(), Processes(instance)):
        node.import_image(archive)


def _nodes(instance: Instance, output: BuildOutput, processes: Processes) -> list[Node]:
    return [Node(name, instance, output, processes) for name in NODE_ADDRESSES]


def _nodes_are_ready(kubectl: Kubectl) -> bool:
    nodes = kubectl.list("nodes")
    return len(nodes) == len(NODE_ADDRESSES) and all(has_condition("Ready")(node) for node in nodes)


def _service_address_answers(kubectl: Kubectl) -> bool:
    return kubectl.succeeds("get", "--raw", "/readyz", f"--server=https://{API_SERVICE_ADDRESS}")


def _install_controllers(instance: Instance, output: BuildOutput, kubectl: Kubectl, *, full: bool) -> None:
    done_file = instance.state / "controllers.json"
    done = json.loads(done_file.read_text()) if done_file.exists() else []

    def install_and_wait(controller: Controller) -> None:
        install(controller, output, kubectl, instance.state / "manifests")
        wait_until_ready(controller, kubectl)
        report(f"{controller.name}: ready")

    missing = [controller for controller in controllers(full=full) if controller.name not in done]
    with ThreadPoolExecutor() as pool:
        list(pool.map(install_and_wait, (controller for controller in missing if controller is not KUEUE)))
    if KUEUE in missing:
        # Last: until Kueue is ready, its webhooks refuse the deployments of the others.
        for node in _nodes(instance, output, Processes(instance)):
            node.import_images([KUEUE.name])
        install_and_wait(KUEUE)
    done_file.write_text(json.dumps([*done, *(controller.name for controller in missing)]))
