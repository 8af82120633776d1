"""`spec.checkpointing` on a real cluster: what pods get, what other writers leave of it, a job that is preempted."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from reprieve.kubernetes import crd
from reprieve.kubernetes.names import ADMISSION_MANAGER
from tests.cluster.kit.cluster import Cluster
from tests.cluster.kit.objects import HOST_PATH, HOST_PYTHON, TRAINER_API, Object, pod_spec, reprieve_runtime
from tests.cluster.kit.operator_deployment import Operator
from tests.cluster.kit.pod_watch import PodWatch
from tests.cluster.kit.process_table import ProcessTable
from tests.cluster.kit.training import Training
from tests.cluster.rig.kubectl import Kubectl, KubectlError, has_condition
from tests.support.golden import check_golden
from tests.support.launch_kit import JOB, Lab, until
from tests.support.places import FIXTURES, JOBS, ROOT

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("operator", "runtime")]

EXAMPLES = ROOT / "examples/kubernetes"
RECORD = FIXTURES / "kueue"
ANNOTATION = "reprieve.dev/checkpointing"
JOB_LABEL = "trainer.kubeflow.org/train-job-name"
STORAGE = {"uri": "pvc://shared/run"}
ELSEWHERE = "kueue.x-k8s.io/multikueue"
"""As `spec.managedBy`: Trainer makes no pods for such jobs."""
STEPS = 240
"""24 s: the example is applied again, and a rank evicted, before they are over."""


def job(name: str, settings: Object | None = None, **trainer: Any) -> Object:
    """A TrainJob that is created suspended: it needs no pods to show what is stored."""
    spec: Object = {"runtimeRef": {"name": "reprieve-torch"}, "suspend": True}
    if trainer:
        spec["trainer"] = trainer
    if settings is not None:
        spec["checkpointing"] = settings
    return {"apiVersion": TRAINER_API, "kind": "TrainJob", "metadata": {"name": name}, "spec": spec}


# What pods get


def container_of(pod: Object) -> Object:
    """What admission gave to the training container, without what the runtime of the tests and Trainer add."""
    [found] = [each for each in pod["spec"]["containers"] if each["name"] == "node"]
    mounts = [
        each for each in found["volumeMounts"] if not each["name"].startswith(("host-", "kube-api-access", "tmp"))
    ]
    env = [
        each
        for each in found["env"]
        if not each["name"].startswith("PET_") and each["name"] not in (*HOST_PYTHON, "PATH")
    ]
    claims = [each for each in pod["spec"]["volumes"] if {each["name"]} & {mount["name"] for mount in mounts}]
    return {
        "command": found["command"],
        "environment": {each["name"]: each.get("value", each.get("valueFrom")) for each in env},
        "mounts": mounts,
        "volumes": claims,
        "label": pod["metadata"]["labels"][JOB_LABEL],
        "gracePeriod": pod["spec"]["terminationGracePeriodSeconds"],
    }


@pytest.mark.parametrize("example", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.stem)
def test_the_pods_of_the_examples_are_exactly_these(namespace: Kubectl, pods: PodWatch, example: Path) -> None:
    namespace.run("apply", "--filename", str(example))
    pods.wait_for(lambda watch: len(watch.latest()) > 0, "there is a pod")
    found = container_of(pods.latest()[0].pod)
    check_golden(FIXTURES / "pods" / example.name, yaml.safe_dump(found, width=120))
    assert [each["metadata"]["name"] for each in namespace.list("pods", selector=f"{JOB_LABEL}={example.stem}")]


def pod_template(namespace: Kubectl, name: str) -> Object:
    """The pods that JobSet will make for a job, under a common name."""
    jobset = namespace.wait_for("jobset", name, lambda _: True)
    [replicated] = jobset["spec"]["replicatedJobs"]
    template: Object = replicated["template"]["spec"]["template"]
    return dict(json.loads(json.dumps(template).replace(name, "JOB")))


def test_the_annotation_alone_gives_the_same_pods(namespace: Kubectl) -> None:
    by_annotation = job("by-annotation", None, command=["torchrun", "train.py"])
    by_annotation["metadata"]["annotations"] = {ANNOTATION: yaml.safe_dump({"storage": STORAGE, "interval": "2m"})}
    namespace.create(by_annotation)
    namespace.create(job("by-field", {"storage": STORAGE, "interval": "2m"}, command=["torchrun", "train.py"]))
    assert pod_template(namespace, "by-annotation") == pod_template(namespace, "by-field")


SHOW = "echo checkpoints go to $CHECKPOINT_URI\ntr '\\0' ' ' < /proc/1/cmdline"
TRAINERS: dict[str, Object] = {
    "script": {"command": ["bash", "-c", SHOW]},
    "arguments": {"args": ["-c", SHOW]},
    "none": {},
}


def test_however_the_command_is_written_the_launcher_is_the_first_process(namespace: Kubectl, pods: PodWatch) -> None:
    """The runtime has a command and arguments. A job replaces both, or the arguments, or nothing."""
    spec = pod_spec(container="node", command=["sh"], with_host_python=True, environment={"PATH": HOST_PATH})
    spec["containers"][0]["args"] = ["-c", SHOW]
    namespace.apply(reprieve_runtime("shell", spec))
    for name, trainer in TRAINERS.items():
        made = job(name, {"storage": {"uri": "/tmp/checkpoints"}}, **trainer)
        made["spec"] |= {"runtimeRef": {"name": "shell", "kind": "TrainingRuntime"}, "suspend": False}
        namespace.create(made)
    for name in TRAINERS:
        namespace.wait_for("trainjob", name, has_condition("Complete"), timeout_s=120)
    pods.wait_for(lambda watch: len(watch.ended()) >= len(TRAINERS), "the pods have ended")
    assert len(pods.ended()) == len(TRAINERS), pods.history()
    for pod in pods.ended():
        shell = "bash" if pod.name.startswith("script-") else "sh"
        log = namespace.logs(pod.name, "--container=node")
        assert "checkpoints go to /tmp/checkpoints" in log and f"reprieve run -- {shell} -c " in log, log


# Bad input


@pytest.fixture(scope="module")
def schema_alone(cluster: Cluster) -> Iterator[str]:
    """A kind of objects with our part of the schema, which no webhook sees. Returns its API version."""
    spec = {"type": "object", "properties": {"checkpointing": crd.schema()["checkpointing"]}}
    version = {
        "name": "v1",
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": {"type": "object", "properties": {"spec": spec}}},
    }
    definition = {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": "samples.test.reprieve.dev"},
        "spec": {
            "group": "test.reprieve.dev",
            "names": {"kind": "Sample", "plural": "samples"},
            "scope": "Namespaced",
            "versions": [version],
        },
    }
    cluster.kubectl.apply(definition)
    cluster.kubectl.wait_for("crd", "samples.test.reprieve.dev", has_condition("Established"))
    until(lambda: cluster.kubectl.succeeds("get", "samples.test.reprieve.dev"))  # kubectl can find it
    yield "test.reprieve.dev/v1"
    cluster.kubectl.delete("crd", "samples.test.reprieve.dev")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"interval": "5 minutes"}, 'Invalid value: "5 minutes": write 5m, 90s or 1h30m'),
        ({"interval": "0"}, "must be more than zero"),
        ({"strategy": "steps", "interval": "5m"}, 'strategy steps counts steps; write interval: "500"'),
        ({"maxCheckpoints": 0}, "keep at least 1"),
        ({"storage": None}, "there is none; write storage.uri"),
        ({"storage": {"uri": "nfs://host/x"}}, "write a folder (/workspace/checkpoints), pvc://CLAIM/FOLDER or s3://"),
        (
            {"storage": {"uri": "/elsewhere", "persistentVolume": {"claimName": "c", "mountPath": "/workspace"}}},
            "the folder is not in the volume",
        ),
        ({"storage": {"uri": "pvc://a/x", "persistentVolume": {"claimName": "b"}}}, "names another claim"),
        ({"storage": {"uri": "/"}}, "write a folder (/workspace/checkpoints)"),
        ({"storage": {"uri": "/w\nx"}}, "without control characters"),
        ({"storage": {"uri": "s3://b/../x"}, "persistentVolume": {"claimName": "c"}}, "write it without .."),
        ({"storage": {"uri": "s3://key:word@b/x"}, "persistentVolume": {"claimName": "c"}}, "or s3://BUCKET/PREFIX"),
    ],
    ids=str,
)  # fmt: skip
def test_the_schema_refuses_bad_settings_by_itself(
    namespace: Kubectl, schema_alone: str, settings: Object, message: str
) -> None:
    """On clusters where the webhook is not there."""
    values = {name: value for name, value in {"storage": STORAGE, **settings}.items() if value is not None}
    with pytest.raises(KubectlError) as caught:
        namespace.create(sample(schema_alone, values))
    assert "spec.checkpointing" in str(caught.value) and message in str(caught.value)


def test_the_schema_takes_a_claim_that_is_named_twice_alike(namespace: Kubectl, schema_alone: str) -> None:
    claim = {"claimName": "c", "mountPath": "/workspace"}
    storage = {"uri": "/workspace/run", "persistentVolume": claim}
    namespace.create(sample(schema_alone, {"storage": storage, "persistentVolume": claim}))


def test_the_schema_lets_nobody_change_settings(namespace: Kubectl, schema_alone: str) -> None:
    namespace.create(sample(schema_alone, {"storage": STORAGE}))
    with pytest.raises(KubectlError, match="the settings of a job cannot change"):
        namespace.patch("sample", "sample", {"spec": {"checkpointing": {"interval": "1m"}}})


def sample(version: str, settings: Object) -> Object:
    return {
        "apiVersion": version,
        "kind": "Sample",
        "metadata": {"name": "sample"},
        "spec": {"checkpointing": settings},
    }


def test_what_only_the_webhook_knows_is_refused_there(namespace: Kubectl) -> None:
    with pytest.raises(KubectlError, match=r"gracePeriod: 300 s is more than the 120 s of runtime reprieve-torch"):
        namespace.create(job("bad", {"storage": STORAGE, "gracePeriod": "5m"}, command=["t"]))
    broken = job("bad", None, command=["t"])
    broken["metadata"]["annotations"] = {ANNOTATION: "storage: {uri"}
    with pytest.raises(KubectlError, match=f"annotation {ANNOTATION} is not YAML"):
        namespace.create(broken)


def test_a_misspelt_field_is_refused_or_named_in_a_warning(namespace: Kubectl) -> None:
    misspelt = job("misspelt", {"storage": STORAGE, "intervall": "5m"}, command=["t"])
    with pytest.raises(KubectlError, match=r'spec.checkpointing.*unknown field "intervall"'):
        namespace.create(misspelt)
    lenient = namespace.arguments("create", "--validate=warn", "--filename", "-")
    done = subprocess.run(lenient, input=json.dumps(misspelt), capture_output=True, text=True, check=True)
    assert 'Warning: unknown field "spec.checkpointing.intervall"' in done.stderr


def test_settings_cannot_change(namespace: Kubectl) -> None:
    namespace.create(job("fixed", {"storage": STORAGE}, command=["t"]))
    with pytest.raises(KubectlError, match="the settings of a job cannot change"):
        namespace.patch("trainjob", "fixed", {"spec": {"checkpointing": {"interval": "1m"}}})
    namespace.patch("trainjob", "fixed", {"spec": {"checkpointing": None}})
    assert namespace.get("trainjob", "fixed")["spec"]["checkpointing"]["storage"] == STORAGE, "it came back"


def test_explain_is_worth_reading(cluster: Cluster) -> None:
    # The API server takes a while to publish a schema.
    until(lambda: cluster.kubectl.succeeds("explain", "trainjob.spec.checkpointing.interval"), limit_s=30)
    text = cluster.kubectl.run("explain", "trainjob.spec.checkpointing.interval")
    assert "a duration (5m, 90s, 1h30m)" in " ".join(text.split())


LISTS_CREDENTIALS = "import os, time; print(os.listdir(os.environ['REPRIEVE_CREDENTIALS_DIR'])); time.sleep(2)"


def test_a_missing_claim_and_a_missing_secret_are_shown(
    operator: Operator, namespace: Kubectl, pods: PodWatch, bind: Callable[[str], Path]
) -> None:
    bind("shared")
    claim = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}}
    namespace.create(
        {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "shared"}, "spec": claim}
    )
    program = ["python3", "-c", LISTS_CREDENTIALS]
    no_claim = job("no-claim", {"storage": {"uri": "pvc://absent/run"}}, command=["t"])
    store = {"uri": "s3://bucket/run", "secretRef": {"name": "keys"}}
    no_secret = job("no-secret", {"storage": store, "persistentVolume": {"claimName": "shared"}}, command=program)
    for each in (no_claim, no_secret):
        each["spec"]["suspend"] = False
        namespace.create(each)

    def described(name: str, text: str) -> bool:
        return text in namespace.run("describe", "pods", "--selector", f"{JOB_LABEL}={name}")

    until(lambda: described("no-claim", 'persistentvolumeclaim "absent" not found'), limit_s=60)
    until(lambda: described("no-secret", 'secret "keys" not found'), limit_s=60)
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "keys"}, "stringData": {"KEY": "hidden-value"}}
    namespace.create(secret)
    with ProcessTable("hidden-value", every_s=0.5) as seen:
        pods.wait_for(lambda watch: any(pod.exit_code == 0 for pod in watch.ended()), "it ran", timeout_s=150)
    [ended] = pods.ended()
    log = namespace.logs(ended.name, "--container=node")
    assert "KEY" in log
    assert not seen.found and seen.samples > 3
    written = [log, json.dumps(ended.pod), json.dumps(namespace.list("trainjob")), json.dumps(operator.log())]
    assert not any("hidden-value" in text for text in written)


# Other writers

FILES = {
    "a command": job("job", {"storage": STORAGE}, command=["torchrun", "train.py"], numNodes=2),
    "a shell": job("job", {"storage": STORAGE}, command=["bash", "-c", "pip list\ntorchrun train.py"]),
    "arguments only": job("job", {"storage": STORAGE}, args=["train.py"]),
    "no trainer": job("job", {"storage": STORAGE}),
    "empty values": job("job", {"storage": STORAGE}, command=["t"], args=[], env=[{"name": "EMPTY", "value": ""}]),
    "the annotation": job("job", None, command=["t"]),
}
FILES["the annotation"]["metadata"]["annotations"] = {ANNOTATION: "storage: {uri: 'pvc://shared/run'}\n"}


@pytest.mark.parametrize("content", FILES.values(), ids=FILES)
@pytest.mark.parametrize("options", [[], ["--server-side"]], ids=["client-side", "server-side"])
def test_a_file_that_is_applied_twice_changes_nothing(
    namespace: Kubectl, tmp_path: Path, content: Object, options: list[str]
) -> None:
    file = tmp_path / "job.json"
    file.write_text(json.dumps(content))
    namespace.run("apply", *options, "--filename", str(file))
    # Where there is only the annotation, the operator writes the block.
    until(lambda: "checkpointing" in namespace.get("trainjob", "job")["spec"])
    before = namespace.get("trainjob", "job")
    namespace.run("apply", *options, "--filename", str(file))
    after = namespace.get("trainjob", "job")
    assert (after["spec"], after["metadata"]["generation"]) == (before["spec"], before["metadata"]["generation"])
    assert after["metadata"]["annotations"][ANNOTATION] == before["metadata"]["annotations"][ANNOTATION]


def test_a_job_of_the_kubeflow_sdk(cluster: Cluster, namespace: Kubectl) -> None:
    done = cluster.run(sys.executable, str(JOBS / "sdk_job.py"), namespace.namespace)
    assert done.returncode == 0, done.stderr
    [stored] = namespace.list("trainjob")
    trainer = stored["spec"]["trainer"]
    assert trainer["command"][:4] == ["reprieve", "run", "--", "bash"]
    assert {"name": "CHECKPOINT_URI", "value": "/mnt/kubeflow-checkpoints/run"} in trainer["env"]


def test_what_kueue_writes_loses_nothing(namespace: Kubectl) -> None:
    """What Kueue sends when it admits a job, preempts it and admits it again: patches, and whole objects without the
    fields that it does not know. test_kueue.py checks that the record is what Kueue sends."""
    job, writes = recorded()
    namespace.create(job)
    before = namespace.get("trainjob", "recorded")
    for write in writes:
        content = json.dumps(write["object"])
        if write["verb"] == "patch":
            namespace.run("patch", "trainjob", "recorded", "--type=merge", f"--patch={content}")
        else:
            until(lambda content=content: is_replaced(namespace, content))
        after = namespace.get("trainjob", "recorded")
        assert after["spec"]["checkpointing"] == before["spec"]["checkpointing"]
        assert after["spec"]["trainer"] == before["spec"]["trainer"]
        assert after["metadata"]["annotations"] == before["metadata"]["annotations"]
        [patch] = [each for each in after["spec"]["runtimePatches"] if each["manager"] == ADMISSION_MANAGER]
        assert patch in before["spec"]["runtimePatches"]
        sent = write["object"]["spec"]
        stored = {name: after["spec"].get(name) for name in sent if name not in ("trainer", "runtimePatches")}
        assert stored == {name: sent[name] for name in stored}, "what Kueue wrote is stored as well"
        managers = [each["manager"] for each in after["spec"]["runtimePatches"]]
        assert {each["manager"] for each in sent.get("runtimePatches", [])} <= set(managers)


def is_replaced(namespace: Kubectl, content: str) -> bool:
    """Write a whole object, unless the operator has written the status after kubectl read its version. Kueue tries
    again then, too."""
    try:
        namespace.run("replace", "--filename", "-", stdin=content)
    except KubectlError as error:
        assert "the object has been modified" in str(error), error
        return False
    return True


def recorded() -> tuple[Object, list[Object]]:
    """The recorded job and what Kueue sent, without the labels by which Kueue would find it, where it runs. Nor does
    Trainer touch the job: Kueue waits until its pods are gone, and tries again where Trainer was faster."""
    job = yaml.safe_load((RECORD / "job.yaml").read_text())
    writes = list(yaml.safe_load_all((RECORD / "writes.yaml").read_text()))
    for each in (job, *(write["object"] for write in writes)):
        each["metadata"].pop("labels", None)
        each.setdefault("spec", {})["managedBy"] = ELSEWHERE
    return job, writes


# A job, from its example to its end


def test_a_job_by_the_example_is_preempted_and_resumes(
    namespace: Kubectl,
    pods: PodWatch,
    tmp_path: Path,
    bind: Callable[[str], Path],
    undisturbed: Callable[..., Lab],
) -> None:
    folder = bind("shared-checkpoint-storage")
    options = {"folder": "/workspace", "steps": STEPS, "step_s": 0.1, "by_environment": True}
    script = (
        f"import runpy, sys\nsys.argv[1:] = [{json.dumps(options)!r}]\nrunpy.run_path({JOB!r}, run_name='__main__')\n"
    )
    (folder / "train.py").write_text(script)
    lab = Lab(tmp_path)
    lab.job = folder
    training = Training(namespace, pods, lab, {"steps": STEPS}, name="checkpointing")
    namespace.run("apply", "--filename", str(EXAMPLES / "checkpointing.yaml"))
    training.wait_for_steps(3)
    namespace.run("apply", "--filename", str(EXAMPLES / "checkpointing.yaml"))
    generation = training.after(lambda: namespace.evict(training.rank(1)))
    assert generation.exit_codes == [143, 143], pods.history()
    stopped_at = training.step
    assert (folder / "checkpoints" / f"checkpoint-{stopped_at}").is_dir()
    assert json.loads((folder / "training_progress.json").read_text())["step"] == stopped_at
    training.wait_until_complete()
    assert f"resuming from checkpoint-{stopped_at}" in training.logs()
    assert training.counted_restarts == 0
    training.assert_equal_to(undisturbed(steps=STEPS))
