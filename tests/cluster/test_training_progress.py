"""`status.trainingProgress` on a real cluster: what it says of a job that is preempted, paused and finished."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cluster.kit.cluster import Cluster
from tests.cluster.kit.objects import HOST_PATH
from tests.cluster.kit.operator_deployment import Operator
from tests.cluster.kit.pod_watch import PodWatch
from tests.cluster.kit.progress_samples import ProgressSamples
from tests.cluster.kit.status import POLL_ANNOTATION, POLL_S, events_of, progress_of, wait_for, wait_for_state
from tests.cluster.kit.training import Training
from tests.cluster.rig.kubectl import Kubectl
from tests.support.launch_kit import Lab
from tests.support.places import ROOT

pytestmark = [pytest.mark.timeout(420), pytest.mark.usefixtures("operator", "runtime")]

LAG_S = POLL_S * 1.1 + 4
"""One poll with its jitter; and the launcher's own update, the write, and two busy cores."""
STEPS, EPOCH_STEPS = 400, 8
TAKE_OVER_WITHIN_S = 20


@pytest.fixture
def training(namespace: Kubectl, pods: PodWatch, tmp_path: Path) -> Training:
    """A job of two nodes that asks for checkpoints."""
    options = {"steps": STEPS, "step_s": 0.1, "by_environment": True, "reports_all": True}
    training = Training(namespace, pods, Lab(tmp_path), options)
    training.checkpointing = {"storage": {"uri": f"{training.lab.job}/checkpoints"}, "interval": "1h"}
    training.environment["PATH"] = HOST_PATH
    return training


def until(condition: Callable[[], bool], *, limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.5)


def test_status_says_what_a_job_does_and_the_verbs_pause_and_resume_it(
    cluster: Cluster, operator: Operator, training: Training, pods: PodWatch, undisturbed: Callable[..., Lab]
) -> None:
    namespace = training.namespace
    training.start()
    namespace.run("annotate", "trainjob", training.name, f"{POLL_ANNOTATION}={POLL_S}")

    def verb(*words: str) -> str:
        options = ("--namespace", namespace.namespace)
        done = cluster.run(sys.executable, "-m", "reprieve", *words, *options)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    with ProgressSamples(training) as samples:
        for rank in (0, 1):
            wait_for_state(namespace, training.name, "Running")
            training.wait_for_steps(20)
            generation = training.after(lambda rank=rank: namespace.delete("pod", training.rank(rank), wait=False))
            assert generation.exit_codes == [143, 143], pods.history()
        # The time left is known some steps after a start.
        new = {"estimatedTimeRemaining", "step"}
        saved = generation.message["step"]
        wait_for(namespace, training.name, lambda found: new <= found.keys() and found["step"] > saved)
        assert_it_has_the_documented_fields(cluster, training)
        assert_the_documented_commands_answer(training, training.rank(0), of_an_end=False)
        leader = operator.leader()
        assert leader in operator.pods()

        # The leader is killed in the middle of its polls.
        with samples.excused():
            operator.kubectl.run("delete", "pod", leader, "--grace-period=0", "--force", "--wait=false")
            until(lambda: operator.leader() not in ("", leader), limit_s=TAKE_OVER_WITHIN_S)
            last = progress_of(namespace.get("trainjob", training.name))["step"]
            wait_for(namespace, training.name, lambda progress: progress["step"] > last, TAKE_OVER_WITHIN_S)

        output = verb("pause", f"trainjob/{training.name}")
        paused = wait_for_state(namespace, training.name, "Paused", within_s=60)
        saved = re.search(r"checkpoint-(\d+)", output)
        assert saved is not None, output
        assert paused["step"] == int(saved[1]) == training.lab.last_step(0)
        assert paused["checkpointing"]["latestCheckpoint"].endswith(f"checkpoint-{paused['step']}")
        assert namespace.get("trainjob", training.name)["spec"]["suspend"] is True
        assert "Paused" in verb("status", f"trainjob/{training.name}")
        until(lambda: "Paused" in samples.states, limit_s=20)  # a pause may be shorter than the time between samples
        verb("resume", f"trainjob/{training.name}")
        training.wait_until_complete()
        done = wait_for_state(namespace, training.name, "Succeeded", within_s=60)
        until(lambda: "Succeeded" in samples.states, limit_s=20)
    [ended] = [pod.name for pod in pods.latest() if pod.index == 0 and pod.name == done["pod"]]
    assert_the_documented_commands_answer(training, ended, of_an_end=True)
    operator.wait_until_ready()
    assert (done["step"], done["percentComplete"], done["restarts"]) == (STEPS, "100.0", 3)
    samples.assert_close_to_the_truth(LAG_S, epoch_steps=EPOCH_STEPS)
    for state in ("Starting", "Running", "Preempted", "Paused", "Succeeded"):
        assert state in samples.states, samples.states
    assert "Unknown" not in samples.states, samples.states
    training.assert_equal_to(undisturbed(steps=STEPS))

    events = events_of(namespace, training.name)
    reasons = [reason for reason, _ in events]
    assert reasons == ["Preempted", "Resumed", "Preempted", "Resumed", "Paused", "Resumed"], events
    assert re.fullmatch(r"saved checkpoint-\d+ in \d+\.\d s", events[0][1]), events
    table = namespace.run("get", "trainjob", training.name)
    assert "100.0" in table, table


def assert_it_has_the_documented_fields(cluster: Cluster, training: Training) -> None:
    """As documents for Kubeflow ask for it: with curl and jq, by the raw API."""
    namespace = training.namespace
    namespace.run("create", "serviceaccount", "reader")
    namespace.run("create", "role", "reader", "--verb=get", "--resource=trainjobs.trainer.kubeflow.org")
    namespace.run("create", "rolebinding", "reader", "--role=reader", f"--serviceaccount={namespace.namespace}:reader")
    token = namespace.run("create", "token", "reader").strip()
    server = cluster.kubectl.run("config", "view", "--minify", "--output", "jsonpath={.clusters[0].cluster.server}")
    url = f"{server}/apis/trainer.kubeflow.org/v1alpha1/namespaces/{namespace.namespace}/trainjobs/{training.name}"
    select = "jq .status.trainingProgress"
    if shutil.which("jq") is None:
        select = (
            'python3 -c \'import json, sys; print(json.dumps(json.load(sys.stdin)["status"]["trainingProgress"]))\''
        )
    # The token comes by standard input: arguments are seen by every user of the machine.
    script = f'curl --silent -H @- -H "Accept: application/json" -k "$0" | {select}'
    done = cluster.run("bash", "-c", script, url, stdin=f"Authorization: Bearer {token}")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    texts = ("loss", "learningRate", "percentComplete", "lastUpdateTime", "estimatedTimeRemaining")
    numbers = ("epoch", "totalEpochs", "step", "totalSteps")
    assert all(isinstance(found[name], str) for name in texts), found
    assert all(isinstance(found[name], int) for name in numbers), found
    kinds = {"enabled": bool, "latestCheckpoint": str, "checkpointsCreated": int, "latestCheckpointTime": str}
    assert {name: type(found["checkpointing"][name]) for name in kinds} == kinds, found


def assert_the_documented_commands_answer(training: Training, pod: str, *, of_an_end: bool) -> None:
    """Those of the troubleshooting table, as they are written: that for a pod that has ended, or the others."""
    page = (ROOT / "docs/kubernetes.md").read_text().partition("## Troubleshooting")[2]
    commands = [found.replace("\\|", "|") for found in re.findall(r"\| `(kubectl [^`]+)` \|", page)]
    assert len(commands) == 6, commands
    values = {"NAME": training.name, "POD": pod, "FOLDER": f"{training.lab.job}/checkpoints"}
    kubectl = shlex.join(training.namespace.arguments())
    chosen = [command for command in commands if ("terminated" in command) == of_an_end]
    assert len(chosen) == (1 if of_an_end else 5), commands
    for command in chosen:
        text = re.sub(r"\b(NAME|POD|FOLDER)\b", lambda found: values[found[0]], command)
        script = f'set -eo pipefail; kubectl() {{ {kubectl} "$@"; }}; {text}'
        done = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
        assert done.returncode == 0, f"{text}: {done.stderr}"
        assert done.stdout, f"{text} printed nothing"


def test_what_cannot_start_says_why_and_other_namespaces_are_none_of_its_business(
    cluster: Cluster, operator: Operator, training: Training, namespace: Kubectl
) -> None:
    training.checkpointing = {"storage": {"uri": "pvc://missing/run"}, "interval": "1h"}
    training.nodes = 1
    training.start()
    found = wait_for_state(namespace, training.name, "Pending", within_s=60)
    until(lambda: [reason for reason, _ in events_of(namespace, training.name)] == ["StorageMissing"], limit_s=60)
    [(_, message)] = events_of(namespace, training.name)
    assert "missing" in message and namespace.namespace in message
    described = namespace.run("describe", "trainjob", training.name)
    assert "StorageMissing" in described, described
    assert "step" not in found
