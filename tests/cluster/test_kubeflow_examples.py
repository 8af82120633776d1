"""The examples for the Kubeflow SDK, as users run them: notebooks from top to bottom, the TrainJob as it is."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import nbformat
import pytest
import yaml

from tests.cluster.kit.cluster import Cluster
from tests.cluster.kit.notebooks import command_in, execute
from tests.cluster.kit.objects import HOST_PATH, Object, claim, pod_spec
from tests.cluster.kit.pod_watch import PodWatch
from tests.cluster.kit.trainer_example import make_inputs
from tests.cluster.rig.kubectl import Kubectl
from tests.support.places import HIDE_OPTIONAL, ROOT

pytestmark = [pytest.mark.timeout(500), pytest.mark.usefixtures("operator", "runtime")]

EXAMPLES = ROOT / "examples/kubeflow"
FINETUNES = {"TESTS_HIDE": "cuda deepspeed sklearn triton", "HF_HUB_OFFLINE": "1", "PATH": HOST_PATH}
"""In the environment of pods that need datasets and peft."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model and data."""
    folder = tmp_path_factory.mktemp("tiny")
    make_inputs(folder)
    samples = json.loads((folder / "alpaca.json").read_text())
    (folder / "data").mkdir()
    lines = [json.dumps({"text": f"{each['instruction']} {each['output']}"}) for each in samples[:50]]
    (folder / "data/train.jsonl").write_text("\n".join(lines * 40))  # 1500 steps
    (folder / "instructions").mkdir()
    lines = [json.dumps(each) for each in samples[:60]]
    (folder / "instructions/train.jsonl").write_text("\n".join(lines))
    return folder


def allow_default_account(namespace: Kubectl) -> str:
    """Give the service account of the namespace all rights in it, and return a token, as a workbench has one."""
    namespace.run("create", "rolebinding", "workbench", "--clusterrole=admin", "--serviceaccount", account(namespace))
    namespace.run("create", "role", "jobs", "--verb=*", "--resource=trainjobs.trainer.kubeflow.org")
    namespace.run("create", "rolebinding", "jobs", "--role=jobs", "--serviceaccount", account(namespace))
    namespace.run("create", "role", "runtimes", "--verb=*", "--resource=trainingruntimes.trainer.kubeflow.org")
    namespace.run("create", "rolebinding", "runtimes", "--role=runtimes", "--serviceaccount", account(namespace))
    return namespace.run("create", "token", "default").strip()


def account(namespace: Kubectl) -> str:
    return f"{namespace.namespace}:default"


SLOW_UNTIL_RESUMED = """
    import time

    from transformers import TrainerCallback

    class Slow(TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            self.pause_s = 0 if state.global_step else 1

        def on_step_end(self, args, state, control, **kwargs):
            time.sleep(self.pause_s)

    trainer.add_callback(Slow())
    trainer.train()
"""


def slowed(notebook: Path, folder: Path) -> Path:
    """Return a copy whose steps take a second until the training is resumed: the operator polls every 15 s at first."""
    content = nbformat.read(notebook, as_version=4)
    [cell] = [each for each in content.cells if each.source.startswith("def train_func(")]
    head, separator, tail = cell.source.partition("\n    trainer.train()\n")
    assert separator, cell.source
    cell.source = f"{head}{SLOW_UNTIL_RESUMED}{tail}"
    folder.mkdir()
    nbformat.write(content, folder / notebook.name)
    return folder / notebook.name


def test_the_notebook_for_openshift_ai_runs_from_top_to_bottom(
    cluster: Cluster, namespace: Kubectl, bind: Callable[[str], Path], tiny: Path, tmp_path: Path
) -> None:
    workbench = bind("shared")
    namespace.create(claim("shared"))
    printed = execute(
        cluster,
        slowed(EXAMPLES / "jit-checkpointing.ipynb", tmp_path / "slowed"),
        tmp_path,
        {"HF_HUB_OFFLINE": "1"},
        MODEL=str(tiny / "llama"),
        DATASET=str(tiny / "instructions"),
        SAMPLES=60,
        EPOCHS=8,  # 120 steps
        SAVE_STEPS=500,
        RESOURCES={"cpu": "1"},
        NAMESPACE=namespace.namespace,
        WORKBENCH=str(workbench),
        ENV={**HIDE_OPTIONAL, "HF_HUB_OFFLINE": "1"},
    )
    assert "PauseOutcome(" in printed and "is_saved=True" in printed
    assert (workbench / "checkpoints/jit-checkpointing/final/model.safetensors").is_file()
    assert namespace.list("trainjob") == []


def adapted(manifests: str) -> list[Object]:
    """The manifests with the Python of this checkout in the pods of the runtime, and nothing else changed."""
    objects: list[Object] = list(yaml.safe_load_all(manifests))
    [runtime] = [each for each in objects if each["kind"] == "TrainingRuntime"]
    spec = pod_spec(container="node", with_host_python=True, environment=FINETUNES)
    pod = runtime["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    [own], [tests] = pod["containers"], spec["containers"]
    own |= {"image": tests["image"], "imagePullPolicy": "Never", "env": [*own["env"], *tests["env"]]}
    own["volumeMounts"] += tests["volumeMounts"]
    pod["volumes"] += spec["volumes"]
    return objects


def test_the_notebook_of_the_train_job_runs_from_top_to_bottom(
    cluster: Cluster, namespace: Kubectl, pods: PodWatch, bind: Callable[[str], Path], tiny: Path, tmp_path: Path
) -> None:
    """It applies the TrainJob, deletes one of its pods, and follows it to the end."""
    workspace = bind("shared-checkpoint-storage")
    shutil.copytree(tiny / "llama", workspace / "llama")
    shutil.copytree(tiny / "data", workspace / "stories")
    manifest = tmp_path / "trl-trainjob.yaml"
    # As JSON: PyYAML writes the text 5e-5 without quotes, and others read that as a number.
    items = adapted((EXAMPLES / manifest.name).read_text())
    manifest.write_text(json.dumps({"apiVersion": "v1", "kind": "List", "items": items}))
    token = allow_default_account(namespace)
    oc = command_in(tmp_path / "bin", "oc", ["echo", token, "#"])
    printed = execute(
        cluster,
        EXAMPLES / "trl-gpt2-checkpointing.ipynb",
        tmp_path,
        {"PATH": oc},
        NAMESPACE=namespace.namespace,
        MANIFEST=str(manifest),
        MODEL="/workspace/llama",
        DATASET="/workspace/stories",
        POLL_S=1,
    )
    assert "resumed from checkpoint-" in printed, printed[-3000:]
    assert sorted(pod.exit_code or 0 for pod in pods.ended()) == [0, 0, 143, 143], pods.history()
    assert (workspace / "checkpoints/final/model.safetensors").is_file()
