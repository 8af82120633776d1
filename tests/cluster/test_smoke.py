"""The cluster does what the scenarios rely on: TrainJobs, pod DNS, torch from the host, PyTorchJobs, disruptions."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.cluster.kit.cluster import Cluster
from tests.cluster.kit.objects import pod, pod_spec, train_job, training_runtime
from tests.cluster.kit.pod_watch import PodWatch
from tests.cluster.kit.training import apply_train_jobs
from tests.cluster.rig.kubectl import Kubectl, has_condition
from tests.cluster.rig.layout import build_output

RENDEZVOUS = """
import os, socket, time
address = os.environ["PET_MASTER_ADDR"], int(os.environ["PET_MASTER_PORT"])
if os.environ["PET_NODE_RANK"] == "0":
    with socket.create_server(("", address[1])) as server, server.accept()[0] as peer:
        print("received", peer.recv(100).decode())
else:
    while True:
        try:
            with socket.create_connection(address, timeout=5) as connection:
                connection.sendall(b"greetings from node 1")
            break
        except OSError as error:
            print("waiting:", error, flush=True)
            time.sleep(0.2)
"""
WAITS_FOR_SIGTERM = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
open("/dev/termination-log", "w").write("stopped")
time.sleep(600)
"""


def test_a_train_job_of_two_nodes_completes(namespace: Kubectl, pods: PodWatch) -> None:
    namespace.apply(training_runtime("python", pod_spec(container="node")))
    apply_train_jobs(namespace, train_job("pair", ["python3", "-c", RENDEZVOUS], runtime="python", nodes=2))
    namespace.wait_for("trainjob", "pair", has_condition("Complete"), timeout_s=90)
    assert {(state.index, state.exit_code) for state in pods.ended()} == {(0, 0), (1, 0)}
    rank_0 = next(state for state in pods.ended() if state.index == 0)
    assert "received greetings from node 1" in namespace.logs(rank_0.name)


def test_pods_import_torch_and_reprieve_from_the_checkout(namespace: Kubectl, pods: PodWatch) -> None:
    command = [sys.executable, "-c", "import torch, reprieve; print(torch.ones(2).sum().item(), reprieve.__file__)"]
    namespace.apply(pod("torch", pod_spec(container="main", command=command, with_host_python=True)))
    pods.wait_for(lambda watch: len(watch.ended()) == 1, "the pod ends", timeout_s=120)
    assert pods.ended()[0].exit_code == 0, namespace.logs("torch")
    assert namespace.logs("torch").startswith("2.0 ")


def test_the_watch_sees_how_an_evicted_pod_ends(namespace: Kubectl, pods: PodWatch) -> None:
    namespace.apply(pod("waits", pod_spec(container="main", command=["python3", "-c", WAITS_FOR_SIGTERM])))
    pods.wait_for(lambda watch: len(watch.running()) == 1, "the pod runs")
    namespace.evict("waits")
    pods.wait_for(lambda watch: watch.latest()[0].is_gone, "the pod is gone")
    (end,) = pods.ended()
    assert (end.exit_code, end.message, end.disruption) == (143, "stopped", "EvictionByEvictionAPI")


def test_a_pytorch_job_completes(namespace: Kubectl, pods: PodWatch) -> None:
    template = {"spec": pod_spec(container="pytorch", command=["python3", "-c", "print('trained')"])}
    job = {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {"name": "legacy"},
        "spec": {"pytorchReplicaSpecs": {"Master": {"replicas": 1, "restartPolicy": "Never", "template": template}}},
    }
    namespace.apply(job)
    namespace.wait_for("pytorchjob", "legacy", has_condition("Succeeded"), timeout_s=60)
    assert [state.exit_code for state in pods.ended()] == [0]


def test_helm_runs() -> None:
    done = subprocess.run([build_output().binary("helm"), "version", "--short"], capture_output=True, text=True)
    assert done.stdout.startswith("v3.22")


@pytest.mark.kueue
def test_kueue_is_ready(cluster: Cluster) -> None:
    service = cluster.kubectl.get("apiservice", "v1beta2.visibility.kueue.x-k8s.io")
    assert has_condition("Available")(service)
