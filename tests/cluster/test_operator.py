"""The operator on a cluster: what it leaves alone, what happens without it, upgrades of Trainer, renewals."""

from __future__ import annotations

import base64
import json
import re
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

from reprieve.kubernetes.names import CHECKPOINTING_ANNOTATION
from tests.cluster.kit.cluster import Cluster
from tests.cluster.kit.objects import Object, pod_spec, train_job, training_runtime
from tests.cluster.kit.operator_deployment import (
    CRD,
    NAME,
    SECRET,
    Operator,
    apply_upstream_definition,
    manifests,
    properties,
)
from tests.cluster.rig.kubectl import Kubectl, KubectlError
from tests.support.launch_kit import until

pytestmark = pytest.mark.timeout(300)

CHECKPOINTING = {"storage": {"uri": "/mnt/kubeflow-checkpoints/run", "persistentVolume": {"claimName": "claim"}}}
BACK_WITHIN_S = 5.0
"""From the upgrade of Trainer on, without the API server's own time for the write."""
READY_WITHIN_S = 30
JOBS = 200
BATCH = 20
RENEWAL_WITHIN_S = 60
ELSEWHERE = "kueue.x-k8s.io/multikueue"
"""As `spec.managedBy`: Trainer makes no pods for such jobs."""


def job(name: str, checkpointing: Object | None = CHECKPOINTING, **spec: Any) -> Object:
    """A job that has no pods, unless `managedBy` says so."""
    made = train_job(name, ["python3", "-c", "pass"], runtime="python")
    made["spec"] |= {"managedBy": ELSEWHERE, **spec}
    if checkpointing is not None:
        made["spec"]["checkpointing"] = checkpointing
    return made


@pytest.fixture
def team(operator: Operator, namespace: Kubectl) -> Kubectl:
    """A namespace with a runtime."""
    namespace.apply(training_runtime("python", pod_spec(container="node", command=["python3", "-c", "pass"])))
    return namespace


def refusal(action: Callable[[], None]) -> str:
    with pytest.raises(KubectlError) as found:
        action()
    return str(found.value)


def settings_of(team: Kubectl, name: str) -> str:
    found: str = team.get("trainjob", name)["metadata"].get("annotations", {}).get(CHECKPOINTING_ANNOTATION, "")
    return found


def test_without_a_replica_jobs_that_ask_are_refused_and_all_else_works(operator: Operator, team: Kubectl) -> None:
    team.create(job("before"))
    before = settings_of(team, "before")
    with operator.stopped():
        message = refusal(lambda: team.create(job("asks")))
        assert "create.trainjobs.reprieve.dev" in message, message
        annotated = job("annotated", None)
        annotated["metadata"]["annotations"] = {CHECKPOINTING_ANNOTATION: json.dumps(CHECKPOINTING)}
        assert "create.trainjobs.reprieve.dev" in refusal(lambda: team.create(annotated))
        team.create(job("plain", None))
        for suspend in (True, False):
            team.patch("trainjob", "before", {"spec": {"suspend": suspend}})
            assert team.get("trainjob", "before")["spec"]["suspend"] is suspend
    assert settings_of(team, "before") == before
    # A replica is ready before all connections of the API server know its address.
    until(lambda: is_created(team, job("asks")), limit_s=READY_WITHIN_S)


def is_created(team: Kubectl, made: Object) -> bool:
    """Create a job, unless the webhook cannot be called yet."""
    try:
        team.create(made)
    except KubectlError as error:
        assert "failed calling webhook" in str(error), error
        return False
    return True


def test_trainers_definition_applied_again_is_repaired_and_jobs_keep_their_settings(
    operator: Operator, team: Kubectl
) -> None:
    team.create(job("keeps"))
    before = team.get("trainjob", "keeps")["spec"]
    for _ in range(2):
        write_s = definition_write_s(operator)
        apply_upstream_definition(operator.cluster)
        operator.wait_until_definition_is_ours(BACK_WITHIN_S + write_s)
    # The API server takes a moment to serve the new schema.
    team.wait_for("trainjob", "keeps", lambda found: found["spec"] == before)
    table = team.run("get", "trainjobs")
    assert {"PROGRESS", "UPDATED", "CHECKPOINT"} <= set(table.split()), table
    # Its OpenAPI document takes longer.
    until(lambda: team.succeeds("explain", "trainjob.spec.checkpointing.interval"), limit_s=30)


def definition_write_s(operator: Operator) -> float:
    """How long the API server takes at present to write the definition: it compiles all rules of the schema."""
    path = "/spec/versions/0/schema/openAPIV3Schema/properties/spec/properties/checkpointing/description"
    change = json.dumps([{"op": "replace", "path": path, "value": "another"}])
    began = time.monotonic()
    operator.cluster.kubectl.run("patch", "crd", CRD, "--type=json", "--dry-run=server", f"--patch={change}")
    return time.monotonic() - began


def test_the_definition_without_our_part_is_trainers_and_other_jobs_are_stored_alike(
    operator: Operator, team: Kubectl
) -> None:
    assert crd_command(operator, "--check") == (0, {"installed": True, "missing": [], "name": CRD})
    team.create(job("asks"), job("plain", None))
    assert "claim" in settings_of(team, "asks")
    assert team.get("trainjob", "asks")["spec"]["trainer"]["command"][:2] == ["reprieve", "run"]
    with_us = stored(team, "plain")
    team.delete("trainjob", "plain")
    with operator.stopped(), operator.without_webhook():
        assert crd_command(operator, "--remove") == (0, {"installed": False, "changed": True, "name": CRD})
        removed = operator.definition()
        apply_upstream_definition(operator.cluster)
        upstream = operator.definition()
        assert removed["spec"] == upstream["spec"]
        assert "checkpointing" not in properties(upstream)["spec"]["properties"]
        team.create(job("plain", None))
        assert stored(team, "plain") == with_us
        code, found = crd_command(operator, "--check")
        assert (code, found["installed"]) == (1, False)
        assert "spec.checkpointing" in found["missing"]
        assert crd_command(operator, "--install") == (0, {"installed": True, "changed": True, "name": CRD})
        assert crd_command(operator, "--install")[1]["changed"] is False
        assert crd_command(operator, "--check")[0] == 0
        apply_upstream_definition(operator.cluster)


def stored(team: Kubectl, name: str) -> str:
    """The object as text, without what differs each time it is created."""
    found = json.loads(team.run("get", "trainjob", name, "--output", "json", "--show-managed-fields"))
    for field in ("uid", "resourceVersion", "creationTimestamp"):
        del found["metadata"][field]
    return re.sub(r'"time": "[^"]*"', "", json.dumps(found, sort_keys=True))


def crd_command(operator: Operator, *options: str) -> tuple[int, Any]:
    done = operator.cluster.run(sys.executable, "-m", "reprieve", "operator", "crd", *options, "--json")
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def test_no_job_is_refused_while_certificates_are_renewed(operator: Operator, team: Kubectl) -> None:
    """At least two hundred jobs, until both replicas serve a certificate that was made after the first of them."""
    assert len(operator.pods()) == 2
    first, began, created = newest_certificate(operator), time.monotonic(), 0
    while created < JOBS or served_since(operator, first) < 2:
        assert time.monotonic() - began < RENEWAL_WITHIN_S, "no renewal"
        team.create(*(job(f"job-{created + number}") for number in range(BATCH)))
        created += BATCH
    assert all(CHECKPOINTING_ANNOTATION in each["metadata"]["annotations"] for each in team.list("trainjobs"))
    assert len(team.list("trainjobs")) == created
    assert [line for line in operator.log() if line["message"].startswith("refused")] == []
    assert "PRIVATE KEY" not in json.dumps(operator.log())


def newest_certificate(operator: Operator) -> str:
    """When the newest certificate expires."""
    secret = operator.kubectl.get("secret", SECRET)["data"]["pairs.json"]
    found: str = json.loads(base64.b64decode(secret))["pairs"][-1]["expires"]
    return found


def served_since(operator: Operator, expires: str) -> int:
    """How many replicas serve a certificate that expires later than this one."""
    count = 0
    for pod in operator.pods():
        lines = [json.loads(line) for line in operator.kubectl.logs(pod).splitlines()]
        served = [line["expires"] for line in lines if line["message"] == "serving a certificate"]
        count += bool(served) and served[-1] > expires
    return count


def test_admission_is_fast(operator: Operator, team: Kubectl) -> None:
    """As the API server measures it, in its own coarse steps. benchmarks/admission.py has the exact figures."""
    before = admission_times(operator.cluster)
    team.create(*(job(f"job-{number}") for number in range(BATCH * 2)))
    after = admission_times(operator.cluster)
    counts = {limit: after[limit] - before.get(limit, 0) for limit in after}
    calls = counts[float("inf")]
    assert calls >= BATCH * 2, f"more where the API server calls it again after another webhook: {counts}"
    assert 2 * counts[0.1] >= calls, f"most take less than 100 ms, however busy the machine is: {counts}"


def admission_times(cluster: Cluster) -> dict[float, int]:
    """How many calls of the webhook took at most so many seconds."""
    pattern = re.compile(
        r'apiserver_admission_webhook_admission_duration_seconds_bucket{name="create\.trainjobs\.reprieve\.dev",'
        r'.*rejected="false".*le="([^"]+)"} (\d+)'
    )
    return {
        float(limit): int(count) for limit, count in pattern.findall(cluster.kubectl.run("get", "--raw", "/metrics"))
    }


def test_the_deployed_pods_would_run_in_a_restricted_namespace(operator: Operator, namespace: Kubectl) -> None:
    operator.cluster.kubectl.run(
        "label", "namespace", namespace.namespace, "pod-security.kubernetes.io/enforce=restricted"
    )
    [deployment] = [each for each in manifests() if each["kind"] == "Deployment"]
    template = deployment["spec"]["template"]
    found = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "operator", "labels": template["metadata"]["labels"]},
        "spec": {**template["spec"], "serviceAccountName": "default"},
    }
    namespace.run("create", "--dry-run=server", "--filename", "-", stdin=json.dumps(found))


def test_the_operator_may_do_nothing_else(operator: Operator) -> None:
    account = f"--as=system:serviceaccount:{operator.kubectl.namespace}:{NAME}"

    def may(verb: str, what: str, *options: str) -> bool:
        return operator.kubectl.succeeds("auth", "can-i", verb, what, account, *options)

    assert may("update", f"secrets/{SECRET}") and may("patch", f"crd/{CRD}")
    assert may("update", f"leases.coordination.k8s.io/{NAME}")
    for verb, what, *options in (
        ("get", "clustertrainingruntimes"),
        ("patch", "trainjobs"),
        ("patch", "trainjobs", "--subresource=status"),
        ("watch", "pods"),
        ("create", "events"),
    ):
        assert may(verb, what, "--all-namespaces", *options), f"{verb} {what} {options}"
    for verb, what, *options in (
        ("get", "secrets"),
        ("list", "secrets"),
        ("delete", f"secrets/{SECRET}"),
        ("patch", "crd/jobsets.jobset.x-k8s.io"),
        ("update", f"mutatingwebhookconfigurations/{NAME}"),
        ("get", "leases.coordination.k8s.io/other"),
        ("create", "trainjobs"),
        ("update", "trainjobs"),
        ("delete", "trainjobs"),
        ("create", "pods"),
        ("delete", "pods"),
        ("create", "pods", "--subresource=exec"),
        ("get", "pods", "--subresource=proxy"),
        ("get", "pods", "--subresource=log"),
    ):
        assert not may(verb, what, *options), f"{verb} {what} {options}"
    assert not may("get", f"secrets/{SECRET}", "--namespace=default")
    assert not may("create", "secrets", "--namespace=default")
    assert not may("create", "leases.coordination.k8s.io", "--namespace=default")
