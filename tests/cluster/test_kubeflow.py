"""Training functions submitted by the Kubeflow SDK, on a real cluster: as a notebook does it, with and without the
operator."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from kubeflow.trainer.options import Annotations, Labels

from reprieve.kubeflow import PeriodicCheckpointConfig, TransformersTrainer
from reprieve.kubernetes.jobs.state import JobState
from reprieve.sdk.command import command_of
from tests.cluster.kit.cluster import Cluster
from tests.cluster.kit.objects import HOST_PATH, claim, pod, pod_spec
from tests.cluster.kit.operator_deployment import Operator
from tests.cluster.kit.pod_watch import PodWatch
from tests.cluster.kit.sdk_session import SdkSession, sdk_session
from tests.cluster.rig.kubectl import Kubectl
from tests.support.generated_functions import imported, nasty_function
from tests.support.launch_kit import until
from tests.support.notebook_training import make_inputs, train_func
from tests.support.places import HIDE_OPTIONAL
from tests.support.sdk_options import patch_with_volume

pytestmark = [pytest.mark.timeout(500), pytest.mark.usefixtures("runtime")]

MOUNT = "/mnt/kubeflow-checkpoints"
LABEL = "trainer.kubeflow.org/train-job-name"
STEPS = 64
SLOW_FROM = 7
"""Two minutes lie between this step and the end, unless the test ends that."""
ENVIRONMENT = {**HIDE_OPTIONAL, "HF_HUB_OFFLINE": "1"}
START_S = 150
POD_LIMIT_S = 120


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model and data, and what an undisturbed run on two ranks makes of them (`losses.json`)."""
    folder = tmp_path_factory.mktemp("inputs")
    make_inputs(f"{folder}/model", f"{folder}/data.json")
    program = (
        "from tests.support.notebook_training import train_func\n"
        f"train_func({f'{folder}/model'!r}, {f'{folder}/data.json'!r}, {str(folder)!r}, {STEPS})"
    )
    (folder / "undisturbed.py").write_text(program)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    env = {**ENVIRONMENT, "PYTHONPATH": str(Path.cwd()), "PATH": HOST_PATH, "OMP_NUM_THREADS": "1"}
    subprocess.run([*torchrun, f"{folder}/undisturbed.py"], check=True, env=env, cwd=folder)
    return folder


@pytest.fixture
def volume(namespace: Kubectl, bind: Callable[[str], Path], inputs: Path) -> Path:
    """The folder behind the claim `shared`, with model and data in it."""
    folder = bind("shared")
    namespace.create(claim("shared"))
    subprocess.run(["cp", "-r", f"{inputs}/model", f"{inputs}/data.json", folder], check=True)
    return folder


@pytest.fixture
def sdk(cluster: Cluster, namespace: Kubectl) -> Iterator[SdkSession]:
    with sdk_session(cluster, namespace.namespace) as session:
        yield session


def trainer(**options: Any) -> TransformersTrainer:
    arguments = {
        "model_path": f"{MOUNT}/model",
        "data_path": f"{MOUNT}/data.json",
        "record": MOUNT,
        "steps": STEPS,
        "pause_s": 2,
        "slow_from": SLOW_FROM,
    }
    defaults: dict[str, Any] = {
        "func": train_func,
        "func_args": arguments,
        "num_nodes": 2,
        "resources_per_node": {"cpu": "1"},
        "env": ENVIRONMENT,
        "output_dir": "pvc://shared/checkpoints/jit",
        "periodic_checkpoint_config": PeriodicCheckpointConfig(save_strategy="steps", save_steps=5, save_total_limit=2),
    }
    return TransformersTrainer(**defaults | options)


@pytest.mark.parametrize("with_operator", [True, False], ids=["operator", "no-operator"])
def test_a_notebook_run_is_paused_and_resumed(
    operator: Operator,
    namespace: Kubectl,
    pods: PodWatch,
    volume: Path,
    inputs: Path,
    sdk: SdkSession,
    with_operator: bool,
) -> None:
    def steps() -> int:
        return min(len(each.read_text().split()) for each in [*volume.glob("steps-*")] or [inputs / "none"])

    (inputs / "none").touch()
    client = sdk.client
    checkpoints = volume / "checkpoints/jit"
    with contextlib.ExitStack() as stack:
        if not with_operator:
            stack.enter_context(operator.stopped())
            stack.enter_context(operator.without_webhook())
        options = [Annotations({"team": "a"}), Labels({"owner": "b"}), patch_with_volume("scratch")]
        job = sdk.call(client.train, runtime="reprieve-torch", trainer=trainer(), options=options)
        stored = namespace.get("trainjob", job)
        check_options(stored)
        until(lambda: steps() >= SLOW_FROM, limit_s=START_S)
        assert sdk.call(client.progress, job).state in (JobState.STARTING, JobState.RUNNING)
        if not with_operator:  # The operator asks the pods every 15 s at first; without one, rank 0 answers itself.
            until(lambda: sdk.call(client.progress, job).progress.step, limit_s=10)
        check_volumes(namespace, job)
        check_troubleshooting(namespace, job)
        check_wire_contract(namespace, job)

        outcome = sdk.call(client.pause, job, reason="night rates")
        assert outcome.is_saved and outcome.step, outcome
        pods.wait_for(lambda pods: len(pods.ended()) == 2, "both pods have ended")
        assert [each.exit_code for each in pods.ended()] == [143, 143], pods.history()
        assert sdk.call(client.progress, job).state == JobState.PAUSED
        assert (checkpoints / f"checkpoint-{outcome.step}").is_dir()
        (checkpoints / "checkpoint-999").mkdir()
        (checkpoints / "checkpoint-999/checkpoint-is-incomplete.txt").touch()

        (volume / "hurry").touch()
        sdk.call(client.resume, job)
        view = sdk.call(client.wait, job, timeout=START_S)
        assert view.state == JobState.SUCCEEDED
        until(lambda: [each.step for each in sdk.call(client.checkpoints, job)][:1] == [STEPS], limit_s=30)
    assert list(checkpoints.glob("*/checkpoint-is-incomplete.txt")) == []
    assert sorted(each.name for each in checkpoints.iterdir() if not each.name.startswith(".")) == [
        f"checkpoint-{max(60, outcome.step)}", f"checkpoint-{STEPS}", "final",
    ]  # fmt: skip
    found, expected = (json.loads((folder / "losses.json").read_text()) for folder in (volume, inputs))
    assert found == {"losses": expected["losses"], "output_dir": f"{MOUNT}/checkpoints/jit"}
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(checkpoints / "final")


def check_options(stored: dict[str, Any]) -> None:
    """What the user's own options added is there, beside Reprieve's."""
    annotations = stored["metadata"]["annotations"]
    assert (
        annotations.items()
        >= {
            "team": "a",
            "trainer.opendatahub.io/progression-tracking": "true",
            "trainer.opendatahub.io/metrics-port": "28080",
            "trainer.opendatahub.io/metrics-poll-interval": "30",
        }.items()
    )
    assert "pvc://" not in annotations["reprieve.dev/checkpointing"]
    assert stored["metadata"]["labels"]["owner"] == "b"
    managers = [each["manager"] for each in stored["spec"]["runtimePatches"]]
    assert managers == ["trainer.kubeflow.org/kubeflow-sdk", "reprieve.dev/admission"]


def check_volumes(namespace: Kubectl, job: str) -> None:
    """Pods have the claim, and the volume of the user's own patch."""
    for each in namespace.list("pods", selector=f"{LABEL}={job}"):
        assert {volume["name"] for volume in each["spec"]["volumes"]} >= {"scratch", "checkpoint-storage"}, each


def check_troubleshooting(namespace: Kubectl, job: str) -> None:
    """The commands of docs/openshift.md."""
    found = namespace.list("pods", selector=f"{LABEL}={job}")
    assert len(found) == 2
    name = sorted(each["metadata"]["name"] for each in found)[0]
    log = namespace.logs(name, "-c", "node")
    lines = [line for line in log.splitlines() if "jit" in line.lower()]
    assert "[Kubeflow] JIT checkpoint signal handler registered for SIGTERM" in lines
    assert "[Kubeflow] JIT checkpointing enabled" in lines
    assert f"[Kubeflow] output_dir: {MOUNT}/checkpoints/jit (the script: /tmp/output)" in log
    assert "checkpoints" in namespace.exec(name, "ls", "-la", f"{MOUNT}/", container="node")


def check_wire_contract(namespace: Kubectl, job: str) -> None:
    """What Red Hat's controller polls."""
    name = sorted(each["metadata"]["name"] for each in namespace.list("pods", selector=f"{LABEL}={job}"))[0]
    path = f"/api/v1/namespaces/{namespace.namespace}/pods/{name}:28080/proxy/"
    until(lambda: json.loads(namespace.run("get", "--raw", path))["currentStep"], limit_s=10)
    found = json.loads(namespace.run("get", "--raw", path))
    kinds: dict[str, Any] = {
        "progressPercentage": int, "estimatedRemainingSeconds": (int, type(None)), "currentStep": int,
        "totalSteps": int, "currentEpoch": float, "totalEpochs": int, "trainMetrics": dict, "evalMetrics": dict,
    }  # fmt: skip
    assert {name: isinstance(found.get(name, "missing"), kind) for name, kind in kinds.items()} == dict.fromkeys(
        kinds, True
    ), found
    assert {"loss", "learning_rate", "grad_norm"} <= found["trainMetrics"].keys()


def test_functions_with_nasty_characters_run_in_a_pod(namespace: Kubectl, tmp_path: Path) -> None:
    """One container for each of ten functions; the container's runtime passes words on, and the shell gets them."""
    spec = pod_spec(container="f0", with_host_python=True, environment={"PATH": HOST_PATH})
    [template] = spec["containers"]
    spec["containers"], expected = [], []
    for number in range(10):
        function = imported(nasty_function(Random(number)), tmp_path)
        command = command_of(TransformersTrainer(func=function).request())
        spec["containers"].append({**template, "name": f"f{number}", "command": command})
        expected.append(ascii(function()))
    namespace.create(pod("functions", spec))
    namespace.wait_for("pod", "functions", lambda found: found["status"]["phase"] == "Succeeded", timeout_s=POD_LIMIT_S)
    logs = [namespace.logs("functions", "-c", f"f{number}").splitlines() for number in range(10)]
    # The launcher's lines go to stderr, which the kubelet may read first.
    assert [next(line for line in log if not line.startswith("reprieve: ")) for log in logs] == expected
