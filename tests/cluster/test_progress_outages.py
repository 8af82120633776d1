"""`status.trainingProgress` when parts of the cluster are away, and what it says of jobs that go wrong."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.kit.cluster import Cluster
from tests.cluster.kit.objects import HOST_PATH, Object, pod_spec, train_job, training_runtime
from tests.cluster.kit.operator_deployment import Operator
from tests.cluster.kit.operator_load import counted
from tests.cluster.kit.pod_watch import PodWatch
from tests.cluster.kit.status import POLL_ANNOTATION, POLL_S, events_of, wait_for, wait_for_state
from tests.cluster.kit.training import Training
from tests.cluster.rig.kubectl import Kubectl
from tests.support.launch_kit import Lab

pytestmark = [pytest.mark.full, pytest.mark.timeout(600), pytest.mark.usefixtures("runtime")]

AWAY_S = 20
CAUGHT_UP_WITHIN_S = 60
REPORTING = """\
import http.server, json, time
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        now = int(time.time())
        content = {"state": "training", "step": now, "totalSteps": 2 * now,
                   "lastUpdateTime": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(now))}
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(content).encode())
    def log_message(self, *_):
        pass
http.server.ThreadingHTTPServer(("", 28080), Handler).serve_forever()
"""
"""Reports the seconds of the clock as its step, so that a status says how old it is."""


@pytest.fixture
def reporting(operator: Operator, namespace: Kubectl, pods: PodWatch) -> Kubectl:
    """A job whose pod only reports progress, in status already."""
    namespace.apply(training_runtime("python", pod_spec(container="node", command=["python3", "-c", "pass"])))
    job = train_job("reporting", ["python3", "-c", REPORTING], runtime="python")
    settings = json.dumps({"storage": {"uri": "/tmp/run"}})
    job["metadata"]["annotations"] = {"reprieve.dev/checkpointing": settings, POLL_ANNOTATION: str(POLL_S)}
    with operator.without_webhook():  # its launcher would need Reprieve in the image
        namespace.create(job)
    wait_for(namespace, "reporting", lambda progress: progress.get("step", 0) > 0)
    return namespace


def assert_it_catches_up(namespace: Kubectl) -> None:
    wait_for(namespace, "reporting", lambda progress: time.time() - progress["step"] < 2 * POLL_S, CAUGHT_UP_WITHIN_S)


def test_status_catches_up_when_the_api_server_was_away(
    cluster: Cluster, operator: Operator, reporting: Kubectl, pods: PodWatch
) -> None:
    before, uids = operator.pods(), [pod.uid for pod in pods.latest()]
    with cluster.without("kube-apiserver", "--allow-privileged=true"):
        time.sleep(AWAY_S)
    cluster.wait_until_controllers_are_ready()
    assert_it_catches_up(reporting)
    assert [each["metadata"]["uid"] for each in reporting.list("pods")] == uids
    assert operator.pods() == before, "the operator's own pods live on"


def test_status_goes_on_when_a_kubelet_is_restarted_and_no_poll_makes_two_writes(
    cluster: Cluster, operator: Operator, reporting: Kubectl, pods: PodWatch
) -> None:
    [pod] = pods.running()
    polls, writes = "reprieve_operator_polls_total", 'reprieve_operator_writes_total{what="status",result="ok"}'
    leader = operator.leader()  # the one before and after: each counts its own
    before = counted(operator, leader, polls), counted(operator, leader, writes)
    with cluster.without("kubelet", f"--hostname-override={pod.node}"):
        time.sleep(AWAY_S)
    assert_it_catches_up(reporting)
    assert [each["metadata"]["uid"] for each in reporting.list("pods")] == [pod.uid]
    after = counted(operator, leader, polls), counted(operator, leader, writes)
    assert 0 < after[1] - before[1] <= after[0] - before[0] + 1


@pytest.mark.usefixtures("operator")
def test_what_goes_wrong_is_told_once_as_an_event(
    namespace: Kubectl, pods: PodWatch, tmp_path: Path, bind: Callable[[str], Path]
) -> None:
    """A save that does not end, an object store that is not written to, a kill without notice, a job after this one."""
    folder = bind("claim")
    namespace.apply(claim("claim"))
    lab = Lab(tmp_path)
    options: dict[str, Any] = {"steps": 4000, "step_s": 0.1, "by_environment": True, "holds_saves": True}
    training = Training(namespace, pods, lab, options, nodes=1)
    training.checkpointing = {
        "storage": {"uri": "s3://bucket/run", "persistentVolume": {"claimName": "claim"}},
        "interval": "5s",
    }
    training.environment["PATH"] = HOST_PATH
    training.start()
    namespace.run("annotate", "trainjob", training.name, f"{POLL_ANNOTATION}={POLL_S}")
    training.wait_for_steps(1)
    (lab.job / "hold").touch()
    wait_for_event(namespace, training.name, "CheckpointStale")
    (lab.job / "hold").unlink()
    wait_for_event(namespace, training.name, "StorageFallback")
    (lab.job / "hold").touch()
    training.wait_for_steps(20)
    time.sleep(2 * POLL_S)  # until the status has them
    for pid in training.processes():
        os.kill(pid, signal.SIGKILL)
    wait_for_event(namespace, training.name, "NotSaved")
    (lab.job / "hold").unlink()
    wait_for_event(namespace, training.name, "Resumed")
    namespace.delete("trainjob", training.name)
    assert list(folder.rglob("checkpoint-*")), "its checkpoints are in the claim"

    training.name = "another"
    training.start()
    wait_for_event(namespace, "another", "ResumedFromEarlierJob")


@pytest.mark.usefixtures("operator")
def test_an_image_without_reprieve_and_a_job_that_never_saves(namespace: Kubectl) -> None:
    """The image of the tests has no Reprieve, and JobSet starts the job again and again."""
    runtime = training_runtime("python", pod_spec(container="node", command=["python3", "-c", "pass"]))
    runtime["spec"]["template"]["spec"]["failurePolicy"] = {"maxRestarts": 20}
    runtime["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]["backoffLimit"] = 0
    namespace.apply(runtime)
    job = train_job("without", ["python3", "-c", "pass"], runtime="python")
    job["spec"]["checkpointing"] = {"storage": {"uri": "/tmp/run"}}
    namespace.create(job)
    wait_for_event(namespace, "without", "ReprieveMissing")
    wait_for_event(namespace, "without", "NoProgress")
    wait_for_state(namespace, "without", "Paused")
    assert namespace.get("trainjob", "without")["spec"]["suspend"] is True
    message = dict(events_of(namespace, "without"))["ReprieveMissing"]
    assert "pip install reprieve" in message


def claim(name: str) -> Object:
    spec = {
        "accessModes": ["ReadWriteMany"],
        "storageClassName": "",
        "resources": {"requests": {"storage": "1Gi"}},
    }
    return {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": name}, "spec": spec}


def wait_for_event(namespace: Kubectl, job: str, reason: str, within_s: float = 120) -> None:
    deadline = time.monotonic() + within_s
    while reason not in (found := [each for each, _ in events_of(namespace, job)]):
        assert time.monotonic() < deadline, f"no event {reason}, but {found}"
        time.sleep(1)
    assert found.count(reason) == 1, found
