"""What the webhook does to TrainJobs that are created, and to those that other writers write again."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from reprieve.kubernetes.runtime import RuntimeReference
from reprieve.operator.admission import respond, runtime_of
from tests.support.golden import check_golden
from tests.support.places import FIXTURES, ROOT
from tests.support.train_jobs import RUNTIME, STORAGE, create, plain_runtime, refusal, train_job_with, update

ANNOTATION = "reprieve.dev/checkpointing"
EXAMPLES = sorted((ROOT / "examples/kubernetes").glob("*.yaml"))


def environment(job: dict[str, Any]) -> dict[str, Any]:
    return {each["name"]: each.get("value", each.get("valueFrom")) for each in job["spec"]["trainer"]["env"]}


def patch_of(job: dict[str, Any]) -> dict[str, Any]:
    [found] = [each for each in job["spec"]["runtimePatches"] if each["manager"] == "reprieve.dev/admission"]
    [replicated] = found["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pod: dict[str, Any] = replicated["template"]["spec"]["template"]
    return pod


def warnings(response: dict[str, Any]) -> str:
    return "\n".join(response.get("warnings", []))


# What a job gets


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_the_examples_get_exactly_this(example: Any) -> None:
    [job] = [each for each in yaml.safe_load_all(example.read_text()) if each["kind"] == "TrainJob"]
    stored, response = create(job)
    text = yaml.safe_dump({"stored": stored, "warnings": response.get("warnings", [])}, sort_keys=False, width=120)
    check_golden(FIXTURES / "admission" / example.name, text)


def test_a_job_without_settings_is_not_touched() -> None:
    job = train_job_with(None)
    stored, response = create(job)
    assert stored == job
    assert response == {"uid": "5", "allowed": True}


def test_a_disabled_job_is_not_touched() -> None:
    job = train_job_with({"enabled": False, "storage": STORAGE})
    stored, response = create(job)
    assert (stored, response) == (job, {"uid": "5", "allowed": True})


def test_the_annotation_alone_gives_the_same_job() -> None:
    by_field, _ = create(train_job_with({"storage": STORAGE, "interval": "2m"}))
    job = train_job_with(None)
    job["metadata"]["annotations"] = {ANNOTATION: yaml.safe_dump({"storage": STORAGE, "interval": "2m"}), "other": "1"}
    by_annotation, _ = create(job)
    assert by_annotation["metadata"]["annotations"].pop("other") == "1"
    del by_field["spec"]["checkpointing"]
    assert by_annotation == by_field


def test_what_the_user_sets_wins() -> None:
    own = [{"name": "CHECKPOINT_INTERVAL", "value": "1m"}, {"name": "MINE", "value": "1"}]
    extra = [{"name": "CHECKPOINT_STRATEGY", "value": "epoch"}, {"name": "MINE", "value": "2"}]
    job = train_job_with({"storage": STORAGE, "env": extra}, command=["python", "t.py"], env=own)
    stored, _ = create(job)
    assert stored["spec"]["trainer"]["env"][:2] == own
    found = environment(stored)
    assert (found["CHECKPOINT_STRATEGY"], found["MINE"], found["CHECKPOINT_INTERVAL"]) == ("epoch", "1", "1m")


def test_what_the_runtime_knows_stays_with_it() -> None:
    stored, _ = create(train_job_with({"storage": STORAGE}))
    assert not {"REPRIEVE_RUN", "REPRIEVE_GRACE", "POD_IP"} & set(environment(stored))
    stored, _ = create(train_job_with({"storage": STORAGE}), plain_runtime(terminationGracePeriodSeconds=45))
    found = environment(stored)
    assert found["REPRIEVE_GRACE"] == "43"
    assert found["REPRIEVE_RUN"]["fieldRef"]["fieldPath"] == "metadata.labels['jobset.sigs.k8s.io/jobset-uid']"
    assert found["POD_IP"]["fieldRef"]["fieldPath"] == "status.podIP"


def test_where_progress_is_written() -> None:
    """In the volume of the claim, or in /tmp, which every container has."""
    stored, _ = create(train_job_with({"storage": STORAGE}))
    assert environment(stored)["TRAINING_PROGRESS_FILE"] == "/workspace/training_progress.json"
    stored, _ = create(train_job_with({"storage": {"uri": "/data/run"}}))
    assert environment(stored)["TRAINING_PROGRESS_FILE"] == "/tmp/training_progress.json"


@pytest.mark.parametrize(("wanted", "gets"), [("60s", "60"), ("2m", "118"), ("119s", "118")])
def test_a_grace_period_within_that_of_the_runtime(wanted: str, gets: str) -> None:
    stored, _ = create(train_job_with({"storage": STORAGE, "gracePeriod": wanted}))
    assert environment(stored)["REPRIEVE_GRACE"] == gets


@pytest.mark.parametrize("wanted", [{}, {"gracePeriod": "5s"}])
@pytest.mark.parametrize("seconds", [0, 1, 2, -5])
def test_a_grace_period_in_which_no_pod_can_save(seconds: int, wanted: dict[str, str]) -> None:
    job = train_job_with({"storage": STORAGE, **wanted})
    fix = f"terminationGracePeriodSeconds is {seconds}, in which no pod can save: write at least 3"
    runtime = plain_runtime(terminationGracePeriodSeconds=seconds)
    assert refusal(job, runtime).startswith(f"runtime reprieve-torch: {fix}")
    job["spec"]["runtimePatches"] = patched({"terminationGracePeriodSeconds": seconds})
    assert refusal(job).startswith(f"spec.runtimePatches: {fix}")


def test_a_patch_of_other_pods_changes_nothing_for_those_that_train() -> None:
    plain, _ = create(train_job_with({"storage": STORAGE}))
    job = train_job_with({"storage": STORAGE})
    mounts = [{"name": "data", "mountPath": "/workspace"}]
    job["spec"]["runtimePatches"] = patched(
        {
            "terminationGracePeriodSeconds": 1,
            "volumes": [{"name": "checkpoint-storage", "emptyDir": {}}],
            "containers": [{"name": "node", "volumeMounts": mounts}],
        },
        name="dataset-initializer",
    )
    stored, _ = create(job)
    assert stored["spec"]["trainer"] == plain["spec"]["trainer"]
    assert patch_of(stored) == patch_of(plain)


def test_a_grace_period_of_any_length() -> None:
    stored, _ = create(train_job_with({"storage": STORAGE}), plain_runtime(terminationGracePeriodSeconds=2**63 - 1))
    assert float(environment(stored)["REPRIEVE_GRACE"]) > 10**8


def test_empty_values_become_no_value() -> None:
    """Kueue drops empty values when it starts a job, and the API server refuses that."""
    job = train_job_with(
        {"storage": STORAGE, "env": [{"name": "A", "value": ""}]},
        command=["t"],
        args=[],
        env=[{"name": "B", "value": ""}],
    )
    stored, _ = create(job)
    trainer = stored["spec"]["trainer"]
    assert "args" not in trainer
    assert {"name": "A"} in trainer["env"] and {"name": "B"} in trainer["env"]


@pytest.mark.parametrize(
    ("trainer", "runtime", "command"),
    [
        (
            {"command": ["bash", "-c", "torchrun t.py"]},
            RUNTIME,
            ["reprieve", "run", "--", "bash", "-c", "torchrun t.py"],
        ),
        ({"command": ["reprieve", "run", "t.py"]}, RUNTIME, ["reprieve", "run", "t.py"]),
        ({"args": ["t.py"]}, plain_runtime(container={"command": ["torchrun"]}), ["reprieve", "run", "--", "torchrun"]),
        ({"image": "x"}, plain_runtime(container={"command": ["sh"]}), ["reprieve", "run", "--", "sh"]),
        ({"command": ["reprieve"], "args": ["run", "t.py"]}, RUNTIME, ["reprieve"]),
        ({"command": ["bash", "-c"], "args": ["exec reprieve run t.py"]}, RUNTIME, ["bash", "-c"]),
        ({"command": ["bash", "-c"], "args": ["exec t.py"]}, RUNTIME, ["reprieve", "run", "--", "bash", "-c"]),
    ],
)
def test_the_launcher_comes_first(trainer: dict[str, Any], runtime: dict[str, Any], command: list[str]) -> None:
    stored, _ = create(train_job_with({"storage": STORAGE}, **trainer), runtime)
    assert stored["spec"]["trainer"]["command"] == command
    assert stored["spec"]["trainer"].get("args") == trainer.get("args")


SCRIPT = ["exec reprieve run t.py"]


@pytest.mark.parametrize(
    ("trainer", "container"),
    [
        ({"args": SCRIPT}, {"command": ["bash", "-c"]}),
        ({"args": SCRIPT}, {"command": ["bash", "-c"], "args": ["exec t.py"]}),
        ({"image": "x"}, {"command": ["bash", "-c"], "args": SCRIPT}),
        ({"command": ["sh", "-c"]}, {"command": ["bash", "-c"], "args": SCRIPT}),
    ],
)
def test_the_arguments_may_start_the_launcher(trainer: dict[str, Any], container: dict[str, Any]) -> None:
    """Those of the job replace those of the runtime, and the same goes for the command."""
    stored, response = create(train_job_with({"storage": STORAGE}, **trainer), plain_runtime(container=container))
    assert stored["spec"]["trainer"].get("command") == trainer.get("command")
    assert "SIGTERM" not in warnings(response)


@pytest.mark.parametrize(
    ("trainer", "warning"),
    [
        ({"args": ["t.py"]}, 'Write spec.trainer.command: ["reprieve", "run", "--", …]'),
        ({"command": ["tune", "run"]}, "torchtune jobs are not protected"),
        ({"command": ["bash", "-c", "reprieve run t.py"]}, "write `exec reprieve run …`"),
        ({"command": ["bash", "-c"], "args": ["reprieve run t.py"]}, "write `exec reprieve run …`"),
    ],
)
def test_a_command_that_is_left_alone_gets_a_warning(trainer: dict[str, Any], warning: str) -> None:
    stored, response = create(train_job_with({"storage": STORAGE}, **trainer))
    assert stored["spec"]["trainer"].get("command") == trainer.get("command")
    assert warning in warnings(response)


def test_a_claim_that_is_mounted_already_is_not_mounted_twice() -> None:
    volume = {"name": "work", "persistentVolumeClaim": {"claimName": "shared"}}
    runtime = plain_runtime(
        container={"volumeMounts": [{"name": "work", "mountPath": "/workspace/"}]}, volumes=[volume]
    )
    stored, _ = create(train_job_with({"storage": STORAGE}), runtime)
    assert "spec" not in patch_of(stored)


@pytest.mark.parametrize(("in_mount", "in_volume"), [({"readOnly": True}, {}), ({}, {"readOnly": True})])
def test_a_claim_that_is_mounted_read_only_is_refused(in_mount: dict[str, Any], in_volume: dict[str, Any]) -> None:
    volume = {"name": "work", "persistentVolumeClaim": {"claimName": "shared", **in_volume}}
    mount = {"name": "work", "mountPath": "/workspace", **in_mount}
    message = refusal(
        train_job_with({"storage": STORAGE}), plain_runtime(container={"volumeMounts": [mount]}, volumes=[volume])
    )
    assert "mounts the claim at /workspace read-only: write another path" in message


def test_a_mount_path_in_use_is_refused() -> None:
    runtime = plain_runtime(
        container={"volumeMounts": [{"name": "x", "mountPath": "/workspace"}]}, volumes=[{"name": "x", "emptyDir": {}}]
    )
    message = refusal(train_job_with({"storage": STORAGE}), runtime)
    assert "mountPath: volume x of runtime" in message and "write another path" in message


def test_a_volume_name_in_use_gets_another_name() -> None:
    runtime = plain_runtime(volumes=[{"name": "checkpoint-storage", "emptyDir": {}}])
    stored, _ = create(train_job_with({"storage": STORAGE}), runtime)
    assert patch_of(stored)["spec"]["volumes"][0]["name"] == "reprieve-checkpoint-storage"


def test_credentials_are_files(caplog: pytest.LogCaptureFixture) -> None:
    storage = {"uri": "s3://bucket/run", "secretRef": {"name": "keys"}}
    settings_ = {"storage": storage, "persistentVolume": {"claimName": "shared"}}
    stored, response = create(train_job_with(settings_))
    pod = patch_of(stored)["spec"]
    assert {"name": "checkpoint-credentials", "secret": {"secretName": "keys"}} in pod["volumes"]
    mounts = {each["mountPath"]: each for each in pod["containers"][0]["volumeMounts"]}
    assert mounts["/var/run/secrets/reprieve"]["readOnly"] is True
    assert environment(stored)["REPRIEVE_CREDENTIALS_DIR"] == "/var/run/secrets/reprieve"
    assert environment(stored)["CHECKPOINT_FALLBACK_URI"] == "/mnt/kubeflow-checkpoints/run"
    assert "this version does not write to s3:// yet" in warnings(response)
    assert caplog.records == [], "only refusals are logged"


# Warnings


def test_a_runtime_without_the_failure_policy() -> None:
    _, response = create(train_job_with({"storage": STORAGE}), plain_runtime())
    assert "runtime torch-distributed" not in warnings(response), "the job names reprieve-torch"
    assert "has no failure policy for preemptions" in warnings(response)
    _, response = create(train_job_with({"storage": STORAGE}))
    assert "warnings" not in response


def test_checkpoints_in_no_volume() -> None:
    _, response = create(train_job_with({"storage": {"uri": "/tmp/checkpoints"}}))
    assert "no writable volume is mounted at /tmp/checkpoints: checkpoints are lost with the pod" in warnings(response)


@pytest.mark.parametrize("where", ["trainer", "checkpointing"])
def test_a_folder_in_a_variable_that_is_not_in_the_volume(where: str) -> None:
    def created(folder: str) -> str:
        job = train_job_with({"storage": STORAGE})
        job["spec"][where]["env"] = [{"name": "CHECKPOINT_URI", "value": folder}]
        return warnings(create(job)[1])

    assert "no writable volume is mounted at /tmp/x" in created("/tmp/x")
    assert "no writable volume is mounted at /tmp/x" in created("file:///tmp/x")
    assert created("/workspace/x") == ""


@pytest.mark.parametrize(
    ("mounts", "outlives"),
    [
        ([{"name": "data", "mountPath": "/w"}], True),
        ([{"name": "data", "mountPath": "/w", "readOnly": True}], False),
        ([{"name": "data", "mountPath": "/w"}, {"name": "scratch", "mountPath": "/w/run"}], False),
        ([{"name": "scratch", "mountPath": "/w"}, {"name": "data", "mountPath": "/w/run/"}], True),
    ],
)
def test_the_volume_of_a_folder_is_the_one_mounted_nearest(mounts: list[dict[str, Any]], outlives: bool) -> None:
    volumes = [{"name": "data", "persistentVolumeClaim": {"claimName": "c"}}, {"name": "scratch", "emptyDir": {}}]
    runtime = plain_runtime(container={"volumeMounts": mounts}, volumes=volumes)
    _, response = create(train_job_with({"storage": {"uri": "/w/run/checkpoints"}}), runtime)
    assert ("no writable volume" not in warnings(response)) is outlives


def test_a_job_without_a_name_and_one_without_a_runtime() -> None:
    stored, response = create(train_job_with({"storage": STORAGE}, name=None), None)
    assert "with generateName the name of the job is not known yet" in warnings(response)
    assert "runtime reprieve-torch was not found" in warnings(response)
    assert "metadata" not in patch_of(stored)


def test_a_claim_of_one_node_for_several() -> None:
    storage = {**STORAGE, "accessMode": "ReadWriteOnce"}
    _, response = create(train_job_with({"storage": storage}, command=["t"], numNodes=2))
    assert "2 nodes need a volume that all of them can mount" in warnings(response)
    runtime = copy.deepcopy(RUNTIME)
    runtime["spec"]["mlPolicy"] = {"numNodes": 4}
    _, response = create(train_job_with({"storage": storage}), runtime)
    assert "4 nodes need a volume" in warnings(response)
    _, response = create(train_job_with({"storage": storage}, command=["t"], numNodes=1), runtime)
    assert "nodes need a volume" not in warnings(response)


@pytest.mark.parametrize("runtime", [RUNTIME, None, plain_runtime()])
def test_warnings_fit_into_the_limit_of_the_api_server(runtime: Any) -> None:
    storage = {"uri": "s3://bucket/" + "x" * 400}
    job = train_job_with({"storage": storage, "persistentVolume": {"claimName": "c" * 60}}, name=None, args=["x"])
    _, response = create(job, runtime)
    assert all(len(warning) <= 256 for warning in response["warnings"])


# Refusals


@pytest.mark.parametrize(
    ("settings_", "message"),
    [
        ({"storage": STORAGE, "interval": "5 minutes"}, "spec.checkpointing.interval: '5 minutes' is not understood"),
        ({"storage": STORAGE, "gracePeriod": "5m"}, "300 s is more than the 120 s of runtime reprieve-torch: write at"),
        (
            {"storage": STORAGE, "killWait": "118s"},
            "spec.checkpointing.killWait: 118 s leaves nothing of the grace period of 118 s to save in: write less",
        ),
        ({"storage": STORAGE, "gracePeriod": "2m", "killWait": "119s"}, "killWait: 119 s leaves nothing of the grace"),
        ({"enabled": True}, "spec.checkpointing.storage: there is none"),
        (
            {"storage": STORAGE, "env": [{"name": "PROGRESS_UPDATE_FREQUENCY", "value": "often"}]},
            "spec.checkpointing.env or spec.trainer.env: PROGRESS_UPDATE_FREQUENCY: 'often' is not a number of steps",
        ),
        (
            {"storage": STORAGE, "env": [{"name": "CHECKPOINT_STRATEGY", "value": "steps"}]},
            "'5m' is not a number of steps, which CHECKPOINT_STRATEGY=steps needs",
        ),
    ],
)
def test_bad_settings_are_refused(settings_: dict[str, Any], message: str) -> None:
    assert message in refusal(train_job_with(settings_))


def patched(pod: object, name: str = "node") -> list[dict[str, Any]]:
    """The patch of another manager to the pods of a replicated job."""
    job = {"name": name, "template": {"spec": {"template": {"spec": pod}}}}
    spec = {"template": {"spec": {"replicatedJobs": [job]}}}
    return [{"manager": "example.com/me", "trainingRuntimeSpec": spec}]


POD = "spec.runtimePatches[0].trainingRuntimeSpec.template.spec.replicatedJobs[0].template.spec.template.spec"


@pytest.mark.parametrize(
    ("part", "content", "message"),
    [
        ("trainer", {"command": "python train.py"}, "spec.trainer.command: it is a text: write a list"),
        ("trainer", {"args": ["--rate", 1]}, "spec.trainer.args[1]: it is a number: write a text in quotes"),
        ("trainer", {"env": {"A": "b"}}, "spec.trainer.env: it is an object: write a list"),
        ("trainer", {"env": ["KEY=hidden"]}, "spec.trainer.env[0]: it is a text and has no fields: write name: value"),
        ("trainer", {"env": [{"value": "1"}]}, "spec.trainer.env[0].name: there is none: write a text"),
        ("trainer", {"env": [{"name": "CHECKPOINT_INTERVAL", "value": 500}]}, "value: it is a number: write a text in"),
        ("trainer", {"numNodes": "two"}, "spec.trainer.numNodes: it is a text: write a whole number"),
        ("trainer", "torchrun", "spec.trainer: it is a text and has no fields"),
        ("runtimeRef", "reprieve-torch", "spec.runtimeRef: it is a text and has no fields"),
        ("runtimeRef", {"name": "../secrets"}, "spec.runtimeRef.name: it is not the name of an object in Kubernetes"),
        ("runtimePatches", {"manager": "me"}, "spec.runtimePatches: it is an object: write a list"),
        ("runtimePatches", [{}], "spec.runtimePatches[0].manager: there is none: write a text"),
        ("runtimePatches", patched({"volumes": [{}]}), f"{POD}.volumes[0].name: there is none"),
        ("runtimePatches", patched({"terminationGracePeriodSeconds": "9"}), f"{POD}.terminationGracePeriodSeconds: it"),
        (
            "runtimePatches",
            patched({"containers": [{"name": "node", "volumeMounts": [{"name": "x"}]}]}),
            f"{POD}.containers[0].volumeMounts[0].mountPath: there is none",
        ),
    ],
)
def test_what_the_schema_would_refuse_is_refused(part: str, content: Any, message: str) -> None:
    """Admission comes first, and must not make a valid job of it."""
    job = train_job_with({"storage": STORAGE})
    job["spec"][part] = content
    assert message in refusal(job)
    _, response = update(train_job_with({"storage": STORAGE}), job)
    assert message in response["status"]["message"]


EXAMPLE: dict[str, Any] = {
    "runtimeRef": {"name": "reprieve-torch", "kind": "TrainingRuntime"},
    "suspend": True,
    "trainer": {"command": ["t"], "args": ["x"], "env": [{"name": "A", "value": "1"}], "numNodes": 2},
    "checkpointing": {
        "interval": "5m",
        "storage": {**STORAGE, "secretRef": {"name": "keys"}},
        "env": [{"name": "B", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}],
    },
    "runtimePatches": patched(
        {
            "terminationGracePeriodSeconds": 60,
            "volumes": [{"name": "v", "persistentVolumeClaim": {"claimName": "c"}}],
            "containers": [{"name": "node", "volumeMounts": [{"name": "v", "mountPath": "/v"}]}],
        }
    ),
}
_JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text()),
    lambda parts: st.lists(parts, max_size=3) | st.dictionaries(st.sampled_from(["name", "env", "x"]), parts),
    max_leaves=5,
)


@st.composite
def damaged_specs(draw: st.DrawFn) -> Any:
    """The spec of the example, of which a part is any JSON."""
    root = {"spec": copy.deepcopy(EXAMPLE)}
    content: Any = root
    key: Any = "spec"
    while content[key] and isinstance(content[key], dict | list) and draw(st.integers(0, 7)):
        content = content[key]
        key = draw(st.sampled_from(sorted(content) if isinstance(content, dict) else range(len(content))))
    content[key] = draw(_JSON)
    return root["spec"]


@given(spec=damaged_specs(), annotation=st.sampled_from([None, "storage: {uri: /x}", "enabled: false"]))
@settings(max_examples=200, deadline=None)
def test_any_json_is_admitted_or_refused(spec: Any, annotation: str | None) -> None:
    job = {**train_job_with(None), "spec": spec}
    if annotation:
        job["metadata"]["annotations"] = {ANNOTATION: annotation}
    stored, _ = create({**train_job_with(None), "spec": EXAMPLE})
    runtime_of({"request": {"operation": "CREATE", "object": job}})
    for _, response in (create(job), update(stored, job), update(job, stored)):
        assert response["allowed"] or response["status"]["message"]


def test_a_job_that_is_nested_too_deeply_is_refused() -> None:
    deep: dict[str, Any] = {}
    for _ in range(900):
        deep = {"a": deep}
    storage = {"storage": STORAGE, "env": [{"name": "A", "valueFrom": deep}]}
    review = {"request": {"uid": "5", "operation": "CREATE", "object": train_job_with(storage)}}
    response = respond(review, RUNTIME)["response"]
    assert response["status"]["message"] == "the TrainJob is nested too deeply"


@pytest.mark.parametrize("value", ["2020-01-01", "!!set {a}", ".nan", f"0x{'f' * 5000}", "!!binary aGlkZGVu"])
def test_a_value_that_json_does_not_have_is_refused(value: str) -> None:
    job = train_job_with(None)
    text = f"storage: {{uri: /x}}\nenv:\n- name: A\n  valueFrom:\n    a:\n      {value}\n"
    job["metadata"]["annotations"] = {ANNOTATION: text}
    assert "it has a value that JSON does not have" in refusal(job)


@pytest.mark.parametrize(
    "text",
    [
        "storage: {uri: /x}\nenv: ['AWS_SECRET_ACCESS_KEY=hidden']",
        "storage: {uri: /x}\nenv: [{name: 'AWS_SECRET_ACCESS_KEY=hidden'}]",
        "storage: {uri: /x}\nenv: [{name: A, value: [hidden]}]",
        "storage: {uri: /x}\ninterval: {hidden: hidden}",
        "enabled: hidden",
        "storage: {uri: /x}\nmaxCheckpoints: hidden",
        "storage: {uri: /x, secretRef: {name: /hidden+}}",
        "storage: {uri: 's3://key:hidden@bucket/x', persistentVolume: {claimName: c}}",
        "env: [{name: A, value: hidden",
        "a: !!int hidden",
        "a: b: hidden",
    ],
)
def test_no_refusal_has_a_secret_that_is_in_the_wrong_place(text: str) -> None:
    job = train_job_with(None)
    job["metadata"]["annotations"] = {ANNOTATION: text}
    assert "hidden" not in refusal(job)


def test_field_and_annotation_that_disagree() -> None:
    job = train_job_with({"storage": STORAGE})
    job["metadata"]["annotations"] = {ANNOTATION: "storage: {uri: /elsewhere}"}
    assert "disagree: keep one of the two" in refusal(job)


def test_broken_yaml_in_the_annotation() -> None:
    job = train_job_with(None)
    job["metadata"]["annotations"] = {ANNOTATION: "storage: {uri"}
    assert refusal(job).startswith(f"annotation {ANNOTATION} is not YAML")


@pytest.mark.parametrize(
    "review",
    [
        {},
        {"request": {}},
        {"request": {"operation": "CREATE", "object": None}},
        {"request": {"operation": "DELETE", "object": None, "oldObject": train_job_with({"storage": STORAGE})}},
    ],
)
def test_a_review_without_a_job_is_let_through(review: dict[str, Any]) -> None:
    assert respond(review, None)["response"]["allowed"]
    assert runtime_of(review) is None


def test_which_runtime_a_decision_needs() -> None:
    job = train_job_with({"storage": STORAGE})
    request = {"operation": "CREATE", "namespace": "team", "object": job}
    assert runtime_of({"request": request}) == RuntimeReference("ClusterTrainingRuntime", "reprieve-torch", "")
    job["spec"]["runtimeRef"]["kind"] = "TrainingRuntime"
    assert runtime_of({"request": request}) == RuntimeReference("TrainingRuntime", "reprieve-torch", "team")
    assert runtime_of({"request": {**request, "operation": "UPDATE"}}) is None


# Other writers


def applied_again(stored: dict[str, Any], file: dict[str, Any]) -> dict[str, Any]:
    """What kubectl sends when a file is applied again: the file's fields, and in the metadata what else is there."""
    new = copy.deepcopy(stored)
    new["spec"] = {**stored["spec"], **copy.deepcopy(file["spec"])}
    new["metadata"].setdefault("annotations", {}).update(copy.deepcopy(file["metadata"].get("annotations", {})))
    return new


def written_by_kueue(stored: dict[str, Any]) -> dict[str, Any]:
    """What Kueue's typed client sends: without fields that it does not know."""
    new = copy.deepcopy(stored)
    new["spec"].pop("checkpointing", None)
    new["spec"]["suspend"] = not stored["spec"].get("suspend", False)
    return new


JOBS = {
    "a command": train_job_with({"storage": STORAGE}),
    "a shell": train_job_with({"storage": STORAGE}, command=["bash", "-c", "torchrun t.py"]),
    "arguments only": train_job_with({"storage": STORAGE}, args=["t.py"]),
    "its own environment": train_job_with(
        {"storage": STORAGE, "env": [{"name": "X", "value": "1"}]},
        command=["t"],
        env=[{"name": "CHECKPOINT_INTERVAL", "value": "1m"}, {"name": "EMPTY", "value": ""}],
    ),
    "no trainer": train_job_with({"storage": STORAGE}, image=None),
    "a patch of its own": train_job_with({"storage": STORAGE}),
}
JOBS["a patch of its own"]["spec"]["runtimePatches"] = [{"manager": "example.com/me", "trainingRuntimeSpec": {}}]


@pytest.mark.parametrize("job", JOBS.values(), ids=JOBS)
@pytest.mark.parametrize("runtime", [RUNTIME, plain_runtime(container={"command": ["torchrun"]})])
def test_the_same_file_applied_again_changes_nothing(job: dict[str, Any], runtime: dict[str, Any]) -> None:
    stored, _ = create(job, runtime)
    again, response = update(stored, applied_again(stored, job))
    assert again == stored
    assert response["allowed"]


@pytest.mark.parametrize("job", JOBS.values(), ids=JOBS)
def test_kueue_loses_nothing(job: dict[str, Any]) -> None:
    stored, _ = create(job)
    started, _ = update(stored, written_by_kueue(stored))
    assert started == {**stored, "spec": {**stored["spec"], "suspend": True}}


def test_the_recorded_writes_of_kueue_lose_nothing() -> None:
    """Whole objects, as sent by a real Kueue (tests/cluster/test_kueue.py)."""
    record = FIXTURES / "kueue"
    stored, _ = create(yaml.safe_load((record / "job.yaml").read_text()))
    writes = [write["object"] for write in yaml.safe_load_all((record / "writes.yaml").read_text())]
    objects = [each for each in writes if "kind" in each]
    assert len(objects) == 3 and all("checkpointing" not in each["spec"] for each in objects)
    for written in objects:
        again, response = update(stored, written)
        assert response["allowed"]
        assert again["spec"]["checkpointing"] == stored["spec"]["checkpointing"]
        assert again["spec"]["trainer"] == stored["spec"]["trainer"]
        assert patch_of(again) == patch_of(stored)
        assert again["metadata"]["annotations"] == stored["metadata"]["annotations"]


def test_an_annotation_applied_again_as_its_author_wrote_it() -> None:
    file = train_job_with(None)
    file["metadata"]["annotations"] = {ANNOTATION: json.dumps({"storage": STORAGE})}
    stored, _ = create(file)
    again, _ = update(stored, applied_again(stored, file))
    assert again == stored


def test_a_removed_annotation_comes_back() -> None:
    stored, _ = create(train_job_with({"storage": STORAGE}))
    new = copy.deepcopy(stored)
    del new["metadata"]["annotations"], new["spec"]["runtimePatches"], new["spec"]["checkpointing"]
    assert update(stored, new)[0] == stored


def test_settings_cannot_change() -> None:
    stored, _ = create(train_job_with({"storage": STORAGE}))
    new = copy.deepcopy(stored)
    new["metadata"]["annotations"][ANNOTATION] = "storage: {uri: /elsewhere}"
    del new["spec"]["checkpointing"]
    _, response = update(stored, new)
    assert response["status"]["message"].startswith(f"annotation {ANNOTATION}: the settings of a job cannot change")
    _, response = update(train_job_with(None), train_job_with({"storage": STORAGE}))
    assert "can only be given settings when it is created" in response["status"]["message"]


DISABLED = train_job_with({"enabled": False, "interval": "5m"})


def test_a_disabled_job_can_be_applied_again_after_kueue() -> None:
    stored, _ = create(DISABLED)
    started, _ = update(stored, written_by_kueue(stored))
    assert started["spec"] == {**stored["spec"], "suspend": True}
    _, response = update(started, applied_again(started, DISABLED))
    assert response["allowed"]


def test_a_job_without_settings_may_get_those_that_change_nothing() -> None:
    """An earlier version of the operator let Kueue drop them."""
    stored, response = update(train_job_with(None), DISABLED)
    assert (stored, response["allowed"]) == (DISABLED, True)


def test_a_job_of_a_newer_operator_is_not_kept_from_stopping() -> None:
    stored, _ = create(train_job_with({"storage": STORAGE}))
    stored["metadata"]["annotations"][ANNOTATION] = "version: 2"
    new = written_by_kueue(stored)
    again, response = update(stored, new)
    assert (again, response["allowed"]) == (new, True)


_NAMES = st.sampled_from(["CHECKPOINT_URI", "CHECKPOINT_MAX_RETAIN", "POD_IP", "A", "B"])


@given(
    own=st.lists(_NAMES, unique=True),
    extra=st.lists(_NAMES, unique=True),
    command=st.sampled_from([None, ["t"], ["reprieve", "run", "t"], ["sh", "-c", "t"]]),
    runtime=st.sampled_from([RUNTIME, None, plain_runtime(container={"command": ["x"]})]),
)
@settings(max_examples=150, deadline=None)
def test_a_second_pass_changes_nothing(own: list[str], extra: list[str], command: Any, runtime: Any) -> None:
    """The API server calls the webhook again after other webhooks, and kubectl sends files again."""
    settings_ = {"storage": STORAGE, "env": [{"name": name, "value": "2"} for name in extra]}
    env = [{"name": name, "value": "3"} for name in own]
    job = train_job_with(settings_, command=command, env=env or None, image="x")
    stored, _ = create(job, runtime)
    assert create(stored, runtime)[0] == stored
    assert update(stored, stored)[0] == stored
    assert update(stored, applied_again(stored, job))[0] == stored
