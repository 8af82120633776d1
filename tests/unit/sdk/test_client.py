"""What the client submits, against an API server in memory, and its verbs."""

from __future__ import annotations

import base64
import json
import logging
import os
import statistics
import subprocess
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubeflow.trainer import CustomTrainer, HuggingFaceDatasetInitializer, Initializer, KubernetesBackendConfig
from kubeflow.trainer import TrainerClient as SdkClient
from kubeflow.trainer.options import Annotations, Labels, Name
from kubernetes.client import Configuration

from reprieve.kubeflow import TrainerClient, TransformersTrainer
from reprieve.kubernetes.jobs.state import JobState
from reprieve.kubernetes.jobs.stop import WaitTimeout
from reprieve.sdk.client import JobFailed
from tests.support.kubernetes_server import KubernetesServer
from tests.support.sdk_options import patch_with_volume
from tests.support.stored_jobs import ended_pod, job_pod, stop_all_pods, stored_job, when
from tests.support.train_jobs import RUNTIME, create, plain_runtime

Object = dict[str, Any]
ANNOTATION = "reprieve.dev/checkpointing"


def train_func(rate: float = 0.1) -> None: ...


@pytest.fixture
def server(tmp_path: Path) -> Iterator[KubernetesServer]:
    with KubernetesServer(tmp_path) as server:
        server.put("clustertrainingruntimes", {"kind": "ClusterTrainingRuntime", **RUNTIME})
        yield server


def connected(kind: Any = TrainerClient) -> Any:
    return kind(KubernetesBackendConfig(namespace="system", config_file=os.environ["KUBECONFIG"]))


def submitted(server: KubernetesServer, name: str) -> Object:
    return server.get("trainjobs", name, "system")


def train(client: Any, *options: Any, **fields: Any) -> str:
    trainer = TransformersTrainer(**{"func": train_func, "output_dir": "pvc://shared/run", **fields})
    return str(client.train(runtime="reprieve-torch", trainer=trainer, options=list(options)))


def test_a_job_has_all_that_it_needs_without_the_operator(server: KubernetesServer) -> None:
    job = submitted(server, train(connected(), num_nodes=2, env={"A": "1"}))
    name = job["metadata"]["name"]
    env = {each["name"]: each["value"] for each in job["spec"]["trainer"]["env"]}
    assert (
        env.items()
        >= {
            "A": "1",
            "CHECKPOINT_URI": "/mnt/kubeflow-checkpoints/run",
            "CHECKPOINT_MAX_RETAIN": "3",
            "REPRIEVE_METRICS_PORT": "28080",
            "TRAINING_PROGRESS_FILE": "/mnt/kubeflow-checkpoints/training_progress.json",
        }.items()
    )
    [patch] = job["spec"]["runtimePatches"]
    [replicated] = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pod = replicated["template"]["spec"]["template"]
    assert pod["metadata"]["labels"] == {"trainer.kubeflow.org/train-job-name": name}
    assert pod["spec"]["volumes"] == [{"name": "checkpoint-storage", "persistentVolumeClaim": {"claimName": "shared"}}]
    assert pod["spec"]["containers"][0]["volumeMounts"] == [
        {"name": "checkpoint-storage", "mountPath": "/mnt/kubeflow-checkpoints"}
    ]
    assert job["spec"]["trainer"]["numNodes"] == 2


def test_a_trainer_is_submitted_as_it_is_now(server: KubernetesServer) -> None:
    trainer = TransformersTrainer(func=train_func)
    trainer.func_args, trainer.output_dir = {"rate": 0.5}, "pvc://shared/run"
    job = submitted(server, connected().train(runtime="reprieve-torch", trainer=trainer))
    request = json.loads(zlib.decompress(base64.b64decode(job["spec"]["trainer"]["command"][-1])))
    assert (request["arguments"], request["submitted"]["protected"]) == ("{'rate': 0.5}", True)
    assert ANNOTATION in job["metadata"]["annotations"]
    trainer.metrics_port = 80
    with pytest.raises(ValueError, match="metrics_port=80"):
        connected().train(runtime="reprieve-torch", trainer=trainer)


def test_admission_adds_only_what_kubernetes_fills_in(server: KubernetesServer) -> None:
    job = submitted(server, train(connected()))
    stored, response = create(job)
    assert response["allowed"], response
    added = [each for each in stored["spec"]["trainer"]["env"] if each not in job["spec"]["trainer"]["env"]]
    assert all("valueFrom" in each for each in added)
    assert stored["spec"]["trainer"]["command"] == job["spec"]["trainer"]["command"]
    assert stored["spec"]["runtimePatches"] == job["spec"]["runtimePatches"]
    assert stored["metadata"]["annotations"] == job["metadata"]["annotations"]


def test_the_arguments_of_train_are_those_of_the_sdk(server: KubernetesServer) -> None:
    """By position, with a runtime of `list_runtimes`, an initializer, and a connection of the caller's own."""
    [cluster] = yaml.safe_load(Path(os.environ["KUBECONFIG"]).read_text())["clusters"]
    configuration = Configuration(host=cluster["cluster"]["server"], api_key={"authorization": "Bearer token"})
    client = TrainerClient(
        backend_config=KubernetesBackendConfig(namespace="system", client_configuration=configuration)
    )
    [runtime] = client.list_runtimes()
    initializer = Initializer(dataset=HuggingFaceDatasetInitializer(storage_uri="hf://tatsu-lab/alpaca"))
    trainer = TransformersTrainer(train_func, {"rate": 1e-3}, output_dir="pvc://shared/run", num_nodes=2)
    spec = submitted(server, client.train(runtime, initializer, trainer, [Name("mine")]))["spec"]
    assert spec["runtimeRef"] == {"kind": "ClusterTrainingRuntime", "name": "reprieve-torch"}
    assert spec["initializer"]["dataset"]["storageUri"] == "hf://tatsu-lab/alpaca"
    assert (spec["trainer"]["command"][3], spec["trainer"]["numNodes"]) == ("reprieve", 2)


def test_a_runtime_that_may_not_be_read_again_is_not_checked(
    server: KubernetesServer, caplog: pytest.LogCaptureFixture
) -> None:
    client = connected()
    runtime = client.get_runtime("reprieve-torch")
    server.forbidden.add("clustertrainingruntimes")
    client.train(runtime, trainer=TransformersTrainer(train_func, output_dir="pvc://shared/run"))
    assert "its grace period and volumes are not checked" in caplog.text


def test_options_of_the_user_survive(server: KubernetesServer) -> None:
    annotations = {"team": "a"}
    job = submitted(server, train(connected(), Annotations(annotations), Labels({"owner": "b"}), Name("mine")))
    assert job["metadata"]["name"] == "mine"
    assert job["metadata"]["labels"] == {"owner": "b"}
    assert (
        job["metadata"]["annotations"].items()
        >= {
            "team": "a",
            "trainer.opendatahub.io/progression-tracking": "true",
            "trainer.opendatahub.io/metrics-port": "28080",
            "trainer.opendatahub.io/metrics-poll-interval": "30",
        }.items()
    )
    assert ANNOTATION in job["metadata"]["annotations"] and annotations == {"team": "a"}


def test_a_patch_of_the_user_survives(server: KubernetesServer) -> None:
    job = submitted(server, train(connected(), patch_with_volume("scratch")))
    user, added = (
        each["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
        for each in job["spec"]["runtimePatches"]
    )
    assert user["volumes"] == [{"name": "scratch", "emptyDir": {}}]
    assert added["volumes"] == [{"name": "checkpoint-storage", "persistentVolumeClaim": {"claimName": "shared"}}]
    managers = [each["manager"] for each in job["spec"]["runtimePatches"]]
    assert managers == ["trainer.kubeflow.org/kubeflow-sdk", "reprieve.dev/admission"]


@pytest.mark.parametrize("output_dir", ["pvc://shared/run", None], ids=["protected", "not protected"])
def test_an_empty_variable_arrives_in_the_form_that_kueue_keeps(
    server: KubernetesServer, output_dir: str | None
) -> None:
    env = {"CUDA_VISIBLE_DEVICES": "", "A": "1"}
    job = submitted(server, train(connected(), env=env, output_dir=output_dir))
    own = [each for each in job["spec"]["trainer"]["env"] if each["name"] in env]
    assert own == [{"name": "CUDA_VISIBLE_DEVICES"}, {"name": "A", "value": "1"}]
    stored, response = create(job)
    assert response["allowed"] and [each for each in stored["spec"]["trainer"]["env"] if each["name"] in env] == own


def test_progress_can_be_turned_off(server: KubernetesServer) -> None:
    job = submitted(server, train(connected(), enable_progression_tracking=False))
    assert list(job["metadata"]["annotations"]) == [ANNOTATION]
    assert {"name": "REPRIEVE_METRICS_PORT", "value": "off"} in job["spec"]["trainer"]["env"]


def test_a_job_that_is_not_protected_gets_label_and_progress_only(server: KubernetesServer) -> None:
    job = submitted(server, train(connected(), output_dir=None, data_connection_name="keys"))
    assert ANNOTATION not in job["metadata"]["annotations"]
    names = [each["name"] for each in job["spec"]["trainer"]["env"]]
    assert names == ["REPRIEVE_METRICS_PORT", "REPRIEVE_CREDENTIALS_DIR"]
    assert "checkpoint-credentials" in yaml.safe_dump(job["spec"]["runtimePatches"])


def test_a_script_that_knows_its_folder_itself(server: KubernetesServer, caplog: pytest.LogCaptureFixture) -> None:
    job = submitted(server, train(connected(), output_dir=None, enable_jit_checkpoint=True))
    assert ANNOTATION not in job["metadata"]["annotations"]
    assert "CHECKPOINT_URI" not in [each["name"] for each in job["spec"]["trainer"]["env"]]
    assert "checkpoints go to the script's own output_dir" in caplog.text


@pytest.mark.parametrize("output_dir", ["run", "./run", "~/run"])
def test_a_folder_that_is_lost_with_its_pod_is_refused(server: KubernetesServer, output_dir: str) -> None:
    with pytest.raises(ValueError, match=f"output_dir='{output_dir}' is below .* write 'pvc://CLAIM/run'"):
        train(connected(), output_dir=output_dir)
    assert not [key for key in server.objects if key[0] == "trainjobs"]


def test_warnings_of_the_runtime_are_logged(server: KubernetesServer, caplog: pytest.LogCaptureFixture) -> None:
    runtime = plain_runtime()
    runtime["metadata"]["labels"] = {"trainer.kubeflow.org/framework": "torch"}
    runtime["spec"]["mlPolicy"] = {"numNodes": 1, "torch": {}}
    server.put("clustertrainingruntimes", {"kind": "ClusterTrainingRuntime", **runtime})
    trainer = TransformersTrainer(func=train_func, output_dir="pvc://shared/run")
    with caplog.at_level(logging.WARNING):
        connected().train(trainer=trainer)  # the SDK's default is torch-distributed
    assert "runtime torch-distributed has no failure policy for preemptions" in caplog.text


def test_a_runtime_that_starts_ranks_with_mpirun_is_refused(server: KubernetesServer) -> None:
    runtime = plain_runtime()
    runtime["metadata"] = {"name": "deepspeed", "labels": {"trainer.kubeflow.org/framework": "deepspeed"}}
    runtime["spec"]["mlPolicy"] = {"numNodes": 1, "mpi": {"numProcPerNode": 1}}
    server.put("clustertrainingruntimes", {"kind": "ClusterTrainingRuntime", **runtime})
    trainer = TransformersTrainer(func=train_func, output_dir="pvc://shared/run")
    with pytest.raises(ValueError, match="runtime deepspeed starts ranks with mpirun"):
        connected().train(runtime="deepspeed", trainer=trainer)


def test_a_grace_period_that_the_runtime_does_not_give_is_refused(server: KubernetesServer) -> None:
    with pytest.raises(ValueError, match="300 s is more than the 120 s of runtime reprieve-torch"):
        train(connected(), grace_period="5m")


def test_an_object_store_without_a_claim_to_fall_back_to_is_refused(server: KubernetesServer) -> None:
    with pytest.raises(ValueError, match="instead, fallback_dir='pvc://CLAIM/FOLDER'"):
        train(connected(), output_dir="s3://bucket/run", data_connection_name="keys")
    assert not [key for key in server.objects if key[0] == "trainjobs"]


def test_the_sdks_own_client_refuses_a_claim(server: KubernetesServer) -> None:
    with pytest.raises(ValueError, match=r"from reprieve\.kubeflow import TrainerClient"):
        train(connected(SdkClient))
    assert not [key for key in server.objects if key[0] == "trainjobs"]


def test_the_sdks_own_client_submits_a_trainer_with_a_folder(server: KubernetesServer) -> None:
    job = submitted(server, train(connected(SdkClient), output_dir="/workspace/run"))
    assert "exec(base64.b64decode(" in "".join(job["spec"]["trainer"]["command"])
    assert "annotations" not in job["metadata"]


def test_other_trainers_are_the_sdks_own_business(server: KubernetesServer) -> None:
    client = connected()
    job = client.train(runtime="reprieve-torch", trainer=CustomTrainer(func=train_func))
    assert "annotations" not in submitted(server, job)["metadata"]


# Verbs


def test_a_job_is_paused_and_resumed(server: KubernetesServer) -> None:
    server.put("trainjobs", stored_job())
    server.put("pods", job_pod("finetune-node-0-0"))
    client = connected()
    is_suspended = lambda: server.get("trainjobs", "finetune", "system")["spec"]["suspend"]  # noqa: E731
    thread = when(is_suspended, lambda: stop_all_pods(server))
    outcome = client.pause("finetune", reason="night")
    thread.join()
    assert (outcome.step, outcome.is_saved) == (57, True)
    assert client.progress("finetune").pause.by == "reprieve.kubeflow"
    client.resume("finetune")
    assert not is_suspended()


def test_wait_reads_the_conditions_also_of_a_job_that_was_resumed(server: KubernetesServer) -> None:
    conditions = [{"type": "Suspended", "status": "False"}, {"type": "Complete", "status": "True"}]
    server.put("trainjobs", stored_job(conditions=conditions))
    assert connected().wait("finetune").state == JobState.SUCCEEDED
    conditions[1] = {"type": "Failed", "status": "True", "message": "exit code 42"}
    server.put("trainjobs", stored_job(conditions=conditions))
    with pytest.raises(JobFailed, match="finetune has failed: exit code 42"):
        connected().wait("finetune")


def test_an_absence_of_the_api_server_only_delays_a_wait(
    server: KubernetesServer, caplog: pytest.LogCaptureFixture
) -> None:
    server.put("trainjobs", stored_job(conditions=[{"type": "Complete", "status": "True"}]))
    client = connected()
    server.stop()
    with pytest.raises(WaitTimeout, match="the API server does not answer"):
        client.wait("finetune", timeout="1ms")
    caplog.clear()
    thread = when(lambda: "trying again" in caplog.text, server.start)
    assert client.wait("finetune").state == JobState.SUCCEEDED
    thread.join()
    assert caplog.text.count("trying again") == 1


def test_progress_is_followed_until_the_end(server: KubernetesServer) -> None:
    server.put("trainjobs", stored_job())
    pod = job_pod("finetune-node-0-0")
    server.put("pods", pod)
    views = connected().progress("finetune", follow=True)
    assert next(views).state == JobState.RUNNING
    server.put("pods", ended_pod(pod, 0))
    server.put("trainjobs", stored_job(conditions=[{"type": "Complete", "status": "True"}]))
    assert [view.state for view in views][-1] == JobState.SUCCEEDED


def test_checkpoints_are_those_that_the_job_has_reported(server: KubernetesServer) -> None:
    server.put("trainjobs", stored_job())
    server.put("pods", ended_pod(job_pod("finetune-node-0-0", phase="Failed"), 143))
    assert [each.step for each in connected().checkpoints("finetune")] == [57]


# What an import costs


def seconds_to_import(statement: str) -> float:
    program = f"import time; began = time.process_time(); {statement}; print(time.process_time() - began)"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, check=True)
    return float(done.stdout)


def test_the_import_costs_little_more_than_that_of_the_sdk() -> None:
    """One after the other, because a machine's speed changes by more than what is measured."""
    ratios = [
        seconds_to_import("import reprieve.kubeflow") / seconds_to_import("import kubeflow.trainer") for _ in range(9)
    ]
    assert statistics.median(ratios) <= 1.2, ratios


def test_reprieve_alone_loads_no_sdk() -> None:
    program = "import sys, reprieve; print([each for each in ('kubeflow', 'kubernetes') if each in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_missing_sdk_is_named_with_its_extra() -> None:
    program = "import sys; sys.modules['kubeflow'] = None\nimport reprieve.kubeflow"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert "pip install 'reprieve[kubeflow]'" in done.stderr
