"""examples/trainer on the cluster: its image, its PyTorchJobs, the manual way, and the Secret."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.kit.cluster import Cluster
from tests.cluster.kit.objects import RESTRICTIONS, Object, pod
from tests.cluster.kit.pod_watch import PodState, PodWatch
from tests.cluster.kit.process_table import ProcessTable
from tests.cluster.kit.trainer_example import FINETUNE, JOB, TrainerExample, example_image, image_pod, make_inputs
from tests.cluster.rig.kubectl import Kubectl, has_condition
from tests.cluster.rig.up import import_image
from tests.support import launch_kit
from tests.support.launch_kit import Lab, processes_with, until
from tests.support.places import ROOT

pytestmark = pytest.mark.timeout(600)
STEPS = 400
START_S = 120
"""How long two pods may take until they train: both import torch, on two shared cores."""


@pytest.fixture(scope="session")
def image(cluster: Cluster) -> None:
    """The image of the example, on all nodes."""
    instance = cluster.own_instance()
    with example_image() as archive:
        import_image(instance, archive)


@pytest.fixture
def example(cluster: Cluster, namespace: Kubectl, tmp_path: Path) -> Iterator[TrainerExample]:
    example = TrainerExample(cluster, namespace, tmp_path)
    yield example
    example.close()


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    """What the stand-in for a training writes: torch alone, because transformers takes long to import."""
    (tmp_path / "lab").mkdir()
    lab = Lab(tmp_path / "lab")
    lab.job.chmod(0o777)
    return lab


def train(example: TrainerExample, lab: Lab, **options: Any) -> None:
    """Deploy the job of the example with the stand-in."""
    example.create_secret()
    command = ["torchrun", launch_kit.JOB, lab.options(**options)]
    example.deploy("fine_tune_job.yaml", command=command, folders=[lab.job])


def wait_for_steps(lab: Lab, pods: PodWatch, count: int) -> None:
    until(lambda: min(lab.last_step(0), lab.last_step(1)) >= count or _has_failed(pods), limit_s=START_S)
    assert not _has_failed(pods), pods.history()


def _has_failed(pods: PodWatch) -> bool:
    """Whether a pod has ended without being stopped, 0 included: the training should still run."""
    return any(pod.exit_code not in (None, 143) for pod in pods.latest())


def running(pods: PodWatch) -> set[str]:
    return {pod.uid for pod in pods.running()}


def wait_for_ends(pods: PodWatch, uids: set[str]) -> list[PodState]:
    """Wait until these pods have ended, and return how."""
    pods.wait_for(lambda watch: uids <= {pod.uid for pod in watch.ended()}, "the pods end", timeout_s=START_S)
    return [pod for pod in pods.ended() if pod.uid in uids]


def losses(lab: Lab) -> list[Any]:
    """What both ranks have seen, by step."""
    return [lab.seen(rank) for rank in range(2)]


@pytest.mark.usefixtures("image")
def test_a_job_whose_pod_is_deleted_resumes_without_a_lost_step(
    example: TrainerExample, pods: PodWatch, lab: Lab, undisturbed: Callable[..., Lab]
) -> None:
    train(example, lab, steps=STEPS, step_s=0.1)
    wait_for_steps(lab, pods, 5)
    first = running(pods)
    example.namespace.delete("pod", f"{JOB}-worker-0", wait=False)
    ends = wait_for_ends(pods, first)
    assert [pod.exit_code for pod in ends] == [143, 143], pods.history()
    stopped_at = lab.last_step()
    assert lab.last_step(1) == stopped_at < STEPS, "both ranks stopped at one step"
    assert all(json.loads(pod.message)["step"] == stopped_at for pod in ends), ends
    (lab.job / "hurry").touch()

    job = example.namespace.wait_for("pytorchjob", JOB, has_condition("Succeeded"), timeout_s=START_S)
    assert losses(lab) == losses(undisturbed(steps=STEPS))
    assert len(pods.latest()) == 4, "each pod was started twice\n" + pods.history()
    assert job["status"]["replicaStatuses"]["Master"]["succeeded"] == 1


def test_the_cluster_accepts_the_manifests_as_they_are(example: TrainerExample) -> None:
    runtime = ROOT / "deploy/runtimes/reprieve-torch.yaml"
    example.run(f"kubectl apply --server-side -f {runtime}")
    try:
        for path in sorted((example.folder / "trainer").glob("*.yaml")):
            assert "warning" not in example.run(f"kubectl apply --dry-run=server -f {path}").stderr.lower()
    finally:
        example.run(f"kubectl delete -f {runtime} --wait=false")


PODS = ("master", "worker")
MODEL = "model/models--meta-llama--Llama-3.2-1B-Instruct/snapshots/9213176726f574b556790deb65791e0c5aa438b6"
TORCHRUN = (
    "cd /app{then} MASTER_ADDR=ftjb-master-0 MASTER_PORT=23456 nohup torchrun --nnodes=2 --node_rank={rank} "
    "--nproc_per_node=1 --master_addr=ftjb-master-0 --master_port=23456 model_train_lora.py "
    f"--model_name /workspace/{MODEL} --dataset_path /workspace/dataset --output_dir /workspace/output "
    "--local_files_only --add_special_tokens > /app/{pod}_training.log 2>&1 &"
)
STAND_IN = """
import os, runpy, sys
assert "--local_files_only" in sys.argv
script, sys.argv[1:] = os.environ["STAND_IN"].split(maxsplit=1)[0], os.environ["STAND_IN"].split(maxsplit=1)[1:]
runpy.run_path(script, run_name="__main__")
"""


def prepare_by_hand(example: TrainerExample) -> None:
    """The commands of the README, as they are."""
    for replica in PODS:
        example.run(f"kubectl cp trainer/model_train_lora.py ftjb-{replica}-0:/app/model_train_lora.py -c pytorch")
    for replica in PODS:
        example.run(f"kubectl exec ftjb-{replica}-0 -c pytorch -- pkill -f torchrun || true")
    for replica in PODS:
        is_running = f"kubectl exec ftjb-{replica}-0 -c pytorch -- pgrep -f torchrun > /dev/null"
        example.run(f"while {is_running}; do sleep 1; done")


def torchrun_by_hand(rank: int, replica: str, *, then: str) -> str:
    return f'kubectl exec ftjb-{replica}-0 -- bash -c "{TORCHRUN.format(rank=rank, pod=replica, then=then)}"'


def log_of(example: TrainerExample, replica: str) -> str:
    return example.run(f"kubectl exec ftjb-{replica}-0 -c pytorch -- cat /app/{replica}_training.log").stdout


def is_training(example: TrainerExample, replica: str) -> bool:
    return example.namespace.succeeds("exec", f"ftjb-{replica}-0", "--", "pgrep", "torchrun")


def wait_for_pods(example: TrainerExample, pods: PodWatch) -> set[str]:
    pods.wait_for(lambda watch: len(watch.running()) == 2, "both pods run", timeout_s=60)
    return running(pods)


@pytest.mark.usefixtures("image")
def test_by_hand(example: TrainerExample, pods: PodWatch, lab: Lab, undisturbed: Callable[..., Lab]) -> None:
    """Command by command. The deletion of a pod saves, and the next start by hand resumes."""
    (example.folder / "trainer/model_train_lora.py").write_text(STAND_IN)
    example.create_secret()
    stand_in = f"{launch_kit.JOB} {lab.options(steps=STEPS, step_s=0.1)}"
    example.deploy("fine_tune_job_manual.yaml", folders=[lab.job], environment={"STAND_IN": stand_in})
    first = wait_for_pods(example, pods)
    prepare_by_hand(example)
    # After `&&`, the shell in the background keeps its output open: the command returns when the training has ended.
    terminals = [example.start(torchrun_by_hand(rank, replica, then=" &&")) for rank, replica in enumerate(PODS)]
    wait_for_steps(lab, pods, 5)
    assert "ftjb" in example.run("kubectl get pytorchjobs").stdout
    example.run("kubectl describe pytorchjob ftjb")
    master = next(pod.uid for pod in pods.running() if pod.name == f"{JOB}-master-0")
    example.namespace.delete("pod", f"{JOB}-master-0", wait=False)
    [end] = wait_for_ends(pods, {master})
    assert end.exit_code == 143, pods.history()
    assert json.loads(end.message)["message"] == "stopped by SIGTERM: nothing runs any more"
    stopped_at = lab.last_step()
    assert lab.last_step(1) == stopped_at < STEPS, "both ranks stopped at one step"
    until(lambda: "exitcode" in log_of(example, "worker"), limit_s=60)  # its torchrun has ended, and the pod holds on
    assert (lab.job / f"checkpoints/checkpoint-{stopped_at}").is_dir()

    pods.wait_for(lambda watch: running(watch) != first and len(watch.running()) == 2, "both pods run", timeout_s=60)
    for terminal in terminals:
        terminal.wait(10)
    prepare_by_hand(example)
    (lab.job / "hurry").touch()
    for rank, replica in enumerate(PODS):
        example.run(torchrun_by_hand(rank, replica, then=";"))
    until(lambda: lab.last_step(0) == lab.last_step(1) == STEPS, limit_s=START_S)
    until(lambda: not any(is_training(example, replica) for replica in PODS), limit_s=60)
    assert f"resuming from checkpoint-{stopped_at}" in log_of(example, "master")
    assert losses(lab) == losses(undisturbed(steps=STEPS))
    assert "ready for commands" in example.run("kubectl logs ftjb-worker-0 -c pytorch").stdout


@pytest.mark.usefixtures("image")
def test_the_image_fine_tunes_as_any_user_with_a_read_only_root(
    namespace: Kubectl, pods: PodWatch, tmp_path: Path
) -> None:
    """The image itself, with a real fine-tuning: stopped, and started again."""
    folder = tmp_path / "workspace"
    make_inputs(folder)

    def spec(steps: int) -> Object:
        return image_pod(
            *("torchrun", "model_train_lora.py", f"--model_name={folder}/llama", f"--dataset_path={folder}/chat.jsonl"),
            *(f"--output_dir={folder}/output", "--local_files_only", "--batch_size=2", "--lora_rank=4"),
            f"--steps={steps}",
            folder=folder,
            environment={
                **FINETUNE,
                "HF_HOME": f"{folder}/huggingface",
                "TRAINING_PROGRESS_FILE": f"{folder}/progress.json",
                "PROGRESS_UPDATE_FREQUENCY": "1",
            },
            security=RESTRICTIONS["both"],
        )

    namespace.apply(pod("first", spec(steps=10_000)))  # it is stopped before
    until(lambda: _step(folder) >= 3 or _has_failed(pods), limit_s=2 * START_S)
    namespace.delete("pod", "first", wait=False)
    [end] = wait_for_ends(pods, {pods.latest()[0].uid})
    assert end.exit_code == 143, pods.history()
    stopped_at = json.loads(end.message)["step"]
    assert (folder / f"output/checkpoint-{stopped_at}").is_dir()

    namespace.apply(pod("second", spec(steps=stopped_at + 20)))
    pods.wait_for(lambda watch: len(watch.ended()) == 2, "the training ends", timeout_s=2 * START_S)
    log = namespace.logs("second")
    assert pods.ended()[1].exit_code == 0 and f"resuming from checkpoint-{stopped_at}" in log, log
    assert (folder / "output/adapter_model.safetensors").is_file()


@pytest.mark.full
@pytest.mark.timeout(1200)  # gigabytes are downloaded and packed
def test_the_size_of_the_whole_image(record_property: Callable[[str, object], None]) -> None:
    """With torch and all that it brings for GPUs. A node pulls this; most of it is torch."""
    with example_image() as bare, example_image("[finetune]") as whole:
        sizes = {"bare_mib": bare.stat().st_size >> 20, "whole_mib": whole.stat().st_size >> 20}
    print(f"\nMiB of the image, packed, without and with torch: {sizes}")
    for name, mib in sizes.items():
        record_property(name, mib)
    assert sizes["bare_mib"] < 200
    assert 2000 < sizes["whole_mib"] < 6000, "with torch, and torch once"


def _step(folder: Path) -> int:
    with contextlib.suppress(OSError, ValueError):
        return int(json.loads((folder / "progress.json").read_text())["step"] or 0)
    return 0


@pytest.mark.full
@pytest.mark.usefixtures("image")
def test_a_permanent_failure_fails_the_job(example: TrainerExample, pods: PodWatch, lab: Lab) -> None:
    train(example, lab, every="often")
    example.namespace.wait_for("pytorchjob", JOB, has_condition("Failed"), timeout_s=START_S)
    pods.wait_for(lambda watch: not watch.running(), "no pod runs any more")
    assert 42 in [pod.exit_code for pod in pods.ended()], pods.history()
    assert len(pods.latest()) == 2, "no pod was started again\n" + pods.history()


@pytest.mark.full
@pytest.mark.usefixtures("image")
def test_a_pod_that_is_killed_does_not_fail_the_job(
    example: TrainerExample, pods: PodWatch, lab: Lab, undisturbed: Callable[..., Lab]
) -> None:
    """The rank of the other pod crashes with 1, and its launcher restarts it."""
    train(example, lab, steps=STEPS, step_s=0.1, every=5)
    wait_for_steps(lab, pods, 12)
    worker = next(each for each in pods.running() if each.name == f"{JOB}-worker-0")
    _kill_first_process(example, worker)
    [end] = wait_for_ends(pods, {worker.uid})
    assert end.exit_code == 137, pods.history()
    (lab.job / "hurry").touch()
    example.namespace.wait_for("pytorchjob", JOB, has_condition("Succeeded"), timeout_s=2 * START_S)
    assert losses(lab) == losses(undisturbed(steps=STEPS))


def _kill_first_process(example: TrainerExample, worker: PodState) -> None:
    """The kernel protects the first process of a container from its own container, and not from the machine."""
    for pid in processes_with(f"{launch_kit.JOB}"):
        words = Path(f"/proc/{pid}/cmdline").read_bytes()
        environment = Path(f"/proc/{pid}/environ").read_bytes()
        if b"reprieve" in words and f"HOSTNAME={worker.name}".encode() in environment and b"run" in words.split(b"\0"):
            os.kill(pid, signal.SIGKILL)


SMALL = {"MAX_STEPS": "120", "BATCH_SIZE": "2", "LORA_RANK": "4", "LEARNING_RATE": "2e-2"}
PROGRESS = {"TRAINING_PROGRESS_FILE": "/workspace/progress.json", "PROGRESS_UPDATE_FREQUENCY": "1"}


@pytest.mark.full
@pytest.mark.usefixtures("image")
def test_a_fine_tuning_on_two_pods_equals_an_undisturbed_one(example: TrainerExample, pods: PodWatch) -> None:
    """The manifest as it is, with another model, other data and few steps."""
    make_inputs(example.workspace)
    example.create_secret()
    example.deploy(
        "fine_tune_job.yaml",
        config={"MODEL_URI": "/workspace/llama", "DATASET_REPO_ID": "/workspace/chat.jsonl", **SMALL},
        environment={**FINETUNE, **PROGRESS},
    )
    until(lambda: _step(example.workspace) >= 5 or _has_failed(pods), limit_s=2 * START_S)
    first = running(pods)
    example.namespace.delete("pod", f"{JOB}-worker-0", wait=False)
    ends = wait_for_ends(pods, first)
    assert [each.exit_code for each in ends] == [143, 143], pods.history()
    example.namespace.wait_for("pytorchjob", JOB, has_condition("Succeeded"), timeout_s=3 * START_S)

    assert adapter(example.workspace / "output") == undisturbed_adapter(example, "llama", "chat.jsonl")


@pytest.mark.full
@pytest.mark.usefixtures("image")
def test_a_fine_tuning_by_hand_equals_an_undisturbed_one(example: TrainerExample, pods: PodWatch) -> None:
    """The script and the commands as they are, with another model in the folder of the one that they name."""
    make_inputs(example.workspace)
    shutil.copytree(example.workspace / "llama", example.workspace / MODEL)
    shutil.copytree(example.workspace / "saved", example.workspace / "dataset")
    subprocess.run(["chmod", "-R", "a+rwX", example.workspace], check=True)
    example.create_secret()
    example.deploy("fine_tune_job_manual.yaml", environment={**FINETUNE, **PROGRESS, **SMALL})
    first = wait_for_pods(example, pods)
    prepare_by_hand(example)
    terminals = [example.start(torchrun_by_hand(rank, replica, then=" &&")) for rank, replica in enumerate(PODS)]
    until(lambda: _step(example.workspace) >= 5, limit_s=2 * START_S)
    master = next(pod.uid for pod in pods.running() if pod.name == f"{JOB}-master-0")
    example.namespace.delete("pod", f"{JOB}-master-0", wait=False)
    [end] = wait_for_ends(pods, {master})
    assert end.exit_code == 143, pods.history()
    until(lambda: not is_training(example, "worker"), limit_s=60)

    pods.wait_for(lambda watch: running(watch) != first and len(watch.running()) == 2, "both pods run", timeout_s=60)
    for terminal in terminals:
        terminal.wait(10)
    prepare_by_hand(example)
    for rank, replica in enumerate(PODS):
        example.run(torchrun_by_hand(rank, replica, then=";"))
    until((example.workspace / "output/adapter_model.safetensors").is_file, limit_s=3 * START_S)
    until(lambda: not any(is_training(example, replica) for replica in PODS), limit_s=60)
    assert "resuming from checkpoint-" in log_of(example, "master")
    words = ("--local_files_only", "--add_special_tokens")
    assert adapter(example.workspace / "output") == undisturbed_adapter(example, MODEL, "dataset", *words)


def adapter(output: Path) -> bytes:
    return (output / "adapter_model.safetensors").read_bytes()


def undisturbed_adapter(example: TrainerExample, model: str, data: str, *words: str) -> bytes:
    """What the script of the example makes of these files of the workspace on two ranks of this machine."""
    output = example.folder / "undisturbed"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    script = [ROOT / "examples/trainer/model_train_lora.py", f"--output_dir={output}", *words]
    inputs = [f"--model_name={example.workspace}/{model}", f"--dataset_path={example.workspace}/{data}"]
    env = {**os.environ, **SMALL, **FINETUNE, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    subprocess.run([*command, *script, *inputs], env=env, check=True, capture_output=True)
    return adapter(output)


# setup-env.sh


def test_the_secret_is_as_expected_and_the_token_nowhere_else(example: TrainerExample) -> None:
    def token() -> str:
        secret = example.namespace.get("secret", "hf-secrets")
        assert secret["type"] == "Opaque" and list(secret["data"]) == ["HF_TOKEN"]
        assert not secret["metadata"].get("annotations"), "no copy of the token in an annotation"
        return base64.b64decode(secret["data"]["HF_TOKEN"]).decode()

    history = example.folder / "history"
    for number in range(2):
        secret = "_".join(["hf", "first" if number == 0 else "second", str(time.time_ns())])
        (example.folder / "trainer/.env").write_text(f"HF_TOKEN={secret}\n")
        with ProcessTable(secret) as seen:
            # As a person does, with a shell that keeps a history.
            typed = "cd trainer/\n./setup-env.sh\ncd ..\n"
            done = example.run(f"HISTFILE={history} bash --norc -i <<'end'\n{typed}end")
        assert "hf-secrets" in done.stdout, done.stderr
        assert token() == secret
        assert not seen.found and seen.samples > 3
        assert secret not in done.stdout + done.stderr
        assert "setup-env.sh" in history.read_text() and secret not in history.read_text()
    (example.folder / "trainer/.env").unlink()
    done = example.run("trainer/setup-env.sh", check=False)
    assert done.returncode == 1 and ".env is missing" in done.stderr
    assert token() == secret, "nothing was changed"
