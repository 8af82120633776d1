"""The chart: its values, what it renders, and its life on a cluster, with the operator's image."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from reprieve.kubernetes.crd_install import FIELD_MANAGER
from reprieve.kubernetes.names import CHECKPOINTING_ANNOTATION, RUNTIME
from tests.cluster.kit.cluster import Cluster
from tests.cluster.kit.helm import CHART, RELEASE, WITHOUT_CLUSTER, Helm, HelmError, cluster_helm, local_helm
from tests.cluster.kit.images import built_image
from tests.cluster.kit.objects import TRAINER_API, Object
from tests.cluster.kit.operator_deployment import (
    CRD,
    MANIFEST,
    NAME,
    NAMESPACE,
    SECRET,
    Operator,
    apply_upstream_definition,
    has_checkpointing,
    undeployed,
)
from tests.cluster.rig.kubectl import Kubectl, KubectlError
from tests.cluster.rig.layout import build_output
from tests.cluster.rig.up import import_image
from tests.support.golden import check_golden
from tests.support.launch_kit import until
from tests.support.places import ROOT

pytestmark = pytest.mark.timeout(300)

IMAGE = "localhost/reprieve-operator"
TAG = "test"
MAX_IMAGE_MB = 250
MONITORING = [f"--set=metrics.{part}.enabled=true" for part in ("serviceMonitor", "rules", "dashboard")]
LEADER_WITHIN_S = 20
GONE_WITHIN_S = 60
CHANGING_KINDS = ("componentstatuses", "events", "events.events.k8s.io")
"""Kinds that say nothing about what was installed."""
HEAD = """\
# The operator for Kubeflow Trainer: webhook, status of TrainJobs, runtime (docs/operator.md).
# Rendered from the chart in deploy/helm/reprieve by `make install-yaml`.
#
#   kubectl apply --server-side -f deploy/install.yaml
"""


# What is rendered

linted = pytest.mark.skipif(
    not build_output().binary("helm").exists(), reason="helm is not built: run make cluster-build"
)
"""Tests that `make lint` runs, too. They need no cluster."""


def rendered(*options: str) -> list[Object]:
    """The objects that the chart makes with these options of helm."""
    return list(yaml.safe_load_all(local_helm().template(*options, namespace=NAMESPACE)))


def find(objects: list[Object], kind: str, name: str = NAME) -> Object:
    [found] = [each for each in objects if (each["kind"], each["metadata"]["name"]) == (kind, name)]
    return found


def allowed(objects: list[Object]) -> dict[str, list[str]]:
    """The verbs that the operator may use on each resource of the cluster."""
    return {what: rule["verbs"] for rule in find(objects, "ClusterRole")["rules"] for what in rule["resources"]}


@linted
def test_helm_has_nothing_to_remark() -> None:
    assert "0 chart(s) failed" in local_helm().run("lint", "--strict", WITHOUT_CLUSTER, str(CHART))


@linted
def test_install_yaml_is_what_the_chart_renders() -> None:
    text = local_helm().template("--no-hooks", "--set=namespace.create=true", namespace=NAMESPACE)
    check_golden(MANIFEST, HEAD + text)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("replicsa=3", "additional properties 'replicsa' not allowed"),
        ("metrics.serviceMonitor.enable=true", "at '/metrics/serviceMonitor': additional properties 'enable'"),
        ("progress.mode=fast", "at '/progress/mode': value must be one of 'direct', 'proxy', 'off'"),
        ("metrics.port=80", "at '/metrics/port': minimum: got 80, want 1,024"),
        ("certificates.life=soon", "at '/certificates/life'"),
        ("replicas=0", "at '/replicas': minimum: got 0, want 1"),
    ],
)
def test_a_wrong_value_is_refused(option: str, message: str) -> None:
    with pytest.raises(HelmError) as found:
        rendered(f"--set={option}")
    assert message in str(found.value)


def test_the_operator_may_do_what_its_mode_needs(tmp_path: Path) -> None:
    direct, proxy = allowed(rendered()), allowed(rendered("--set=progress.mode=proxy"))
    assert direct["trainjobs/status"] == ["patch"]
    assert "pods/proxy" not in direct
    assert proxy == {**direct, "pods/proxy": ["get"]}
    # YAML reads this `off` as false.
    (tmp_path / "values.yaml").write_text("progress: {mode: off}\n")
    off = rendered(f"--values={tmp_path / 'values.yaml'}")
    assert allowed(off).keys() == {
        *("clustertrainingruntimes", "trainingruntimes", "mutatingwebhookconfigurations", "customresourcedefinitions")
    }
    assert "Lease" not in {each["kind"] for each in off}
    [container] = find(off, "Deployment")["spec"]["template"]["spec"]["containers"]
    assert "--progress=off" in container["args"]


def test_without_the_definition_and_with_certificates_of_others() -> None:
    objects = rendered("--set=crd.manage=false", "--set=webhook.certSecret=mine", "--set=metrics.port=0")
    assert allowed(objects).keys().isdisjoint({"customresourcedefinitions", "mutatingwebhookconfigurations"})
    assert not [each for each in objects if each["metadata"]["name"] == "reprieve-uninstall"]
    assert "secrets" not in json.dumps(find(objects, "Role"))
    pod = find(objects, "Deployment")["spec"]["template"]["spec"]
    assert pod["volumes"] == [{"name": "certificates", "secret": {"secretName": "mine"}}]
    assert [port["name"] for port in pod["containers"][0]["ports"]] == ["webhook"]
    assert [port["name"] for port in find(objects, "Service")["spec"]["ports"]] == ["webhook"]


def test_the_metrics_are_for_those_that_are_named() -> None:
    peer = "networkPolicy.metricsFrom[0].namespaceSelector.matchLabels.team=monitoring"
    for option, admitted in (
        ("--set=networkPolicy.metricsFrom=null", None),
        (f"--set={peer}", [{"namespaceSelector": {"matchLabels": {"team": "monitoring"}}}]),
    ):
        rules = find(rendered(option), "NetworkPolicy")["spec"]["ingress"]
        found = {rule["ports"][0]["port"]: rule.get("from") for rule in rules}
        assert found == {"webhook": None} | ({"metrics": admitted} if admitted else {}), option


def test_monitoring_is_the_files_of_the_chart() -> None:
    objects = rendered(*MONITORING, "--set=metrics.rules.labels.release=prometheus")
    rule = find(objects, "PrometheusRule")
    assert rule["spec"] == yaml.safe_load((CHART / "files/alerts.yaml").read_text())
    assert rule["metadata"]["labels"]["release"] == "prometheus"
    dashboard = find(objects, "ConfigMap", "reprieve-dashboard")["data"]["reprieve.json"]
    assert json.loads(dashboard) == json.loads((CHART / "files/dashboard.json").read_text())
    assert find(objects, "ServiceMonitor")["spec"]["endpoints"][0]["honorLabels"] is True


def test_the_cluster_accepts_all_of_it_without_a_warning(cluster: Cluster, namespace: Kubectl) -> None:
    restrict(cluster, namespace, "enforce", "warn")
    text = local_helm().template("--set=metrics.dashboard.enabled=true", namespace=namespace.namespace)
    command = cluster.kubectl.arguments("apply", "--server-side", "--force-conflicts", "--dry-run=server", "-f", "-")
    done = subprocess.run(command, input=text, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "job.batch/reprieve-uninstall serverside-applied" in done.stdout


# Its life on a cluster


@dataclass
class Release:
    """The chart, installed in a namespace of its own."""

    cluster: Cluster
    kubectl: Kubectl
    helm: Helm
    before: set[str]
    """What was there before."""
    upstream: Object
    """The definition of TrainJobs before."""

    def uninstall(self) -> None:
        self.helm.run(
            "uninstall", RELEASE, f"--namespace={self.kubectl.namespace}", "--ignore-not-found", "--timeout=2m"
        )


@pytest.fixture(scope="module")
def image(cluster: Cluster) -> None:
    """The operator's image, on all nodes."""
    instance = cluster.own_instance()
    with built_image(ROOT / "deploy/images/operator", f"{IMAGE}:{TAG}", "[operator]") as builder:
        assert builder.size_mb(f"{IMAGE}:{TAG}") <= MAX_IMAGE_MB
        import_image(instance, builder.archive(f"{IMAGE}:{TAG}"))


@pytest.fixture(scope="module")
def release(cluster: Cluster, image: None) -> Iterator[Release]:
    with undeployed(cluster):
        cluster.kubectl.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "chart"}})
        kubectl, helm = cluster.kubectl.for_namespace("chart"), cluster_helm(cluster)
        kubectl.wait_for("serviceaccount", "default", lambda _: True)
        restrict(cluster, kubectl, "enforce")
        apply_upstream_definition(cluster)  # a test that failed may have left ours
        upstream = definition(cluster)
        found = Release(cluster, kubectl, helm, installed_objects(kubectl), upstream)
        values = f"--set=image.repository={IMAGE},image.tag={TAG},image.pullPolicy=Never"
        try:
            helm.run("install", RELEASE, str(CHART), "--namespace=chart", values, "--wait", "--timeout=2m")
            # The API server takes a moment to publish the definition that the operator has changed.
            until(lambda: kubectl.succeeds("explain", "trainjob.spec.checkpointing"))
            yield found
        finally:
            found.uninstall()
            cluster.kubectl.delete("namespace", "chart", wait=False)


def restrict(cluster: Cluster, namespace: Kubectl, *modes: str) -> None:
    labels = [f"pod-security.kubernetes.io/{mode}=restricted" for mode in modes]
    cluster.kubectl.run("label", "namespace", namespace.namespace, *labels)


def definition(cluster: Cluster) -> Object:
    return Operator(cluster, cluster.kubectl).definition()


def installed_objects(kubectl: Kubectl) -> set[str]:
    """Everything in the namespace, and what has our name elsewhere."""
    kinds = kubectl.run("api-resources", "--verbs=list", "--output=name").split()
    columns = "custom-columns=:kind,:metadata.namespace,:metadata.name"
    options = ("--all-namespaces", "--no-headers", f"--output={columns}", "--ignore-not-found")
    lines = kubectl.run("get", ",".join(kind for kind in kinds if kind not in CHANGING_KINDS), *options).splitlines()
    found = {" ".join(line.split()) for line in lines}
    return {each for each in found if f" {kubectl.namespace} " in each or "reprieve" in each}


def job(name: str, **spec: object) -> Object:
    """A TrainJob that is created suspended: it has no pods."""
    checkpointing = {"storage": {"uri": "pvc://shared/run"}}
    spec = {"runtimeRef": {"name": RUNTIME}, "suspend": True, "checkpointing": checkpointing, **spec}
    return {"apiVersion": TRAINER_API, "kind": "TrainJob", "metadata": {"name": name}, "spec": spec}


def test_two_restricted_replicas_serve_jobs_with_the_runtime_of_the_chart(release: Release, namespace: Kubectl) -> None:
    pods = release.kubectl.list("pods", selector=f"app.kubernetes.io/name={NAME}")
    assert len({pod["spec"]["nodeName"] for pod in pods}) == 2
    assert all(status["ready"] for pod in pods for status in pod["status"]["containerStatuses"])
    found = release.kubectl.exec(pods[0]["metadata"]["name"], "sh", "-c", "id -u; find / -name torch -type d || true")
    assert found.split() == ["65532"], "no torch, and not root"
    until(lambda: Operator(release.cluster, release.kubectl).leader(), limit_s=LEADER_WITHIN_S)
    service = f"/api/v1/namespaces/{release.kubectl.namespace}/services/{NAME}:metrics/proxy/metrics"
    assert "\nreprieve_operator_is_leader " in release.kubectl.run("get", "--raw", service)
    namespace.create(job("asks"))
    stored = namespace.get("trainjob", "asks")
    assert CHECKPOINTING_ANNOTATION in stored["metadata"]["annotations"]
    assert has_checkpointing(definition(release.cluster))


def test_a_user_sees_and_changes_the_jobs_of_their_own_namespace(
    release: Release, cluster: Cluster, namespace: Kubectl
) -> None:
    """The rights come from Kubernetes' own roles, to which the chart adds TrainJobs."""
    other = release.kubectl
    for each in (namespace, other):
        each.create(job("job"))
    for user, role in (("ann", "edit"), ("bob", "view")):
        namespace.run("create", "rolebinding", user, f"--clusterrole={role}", f"--user={user}")
    until(lambda: namespace.succeeds("auth", "can-i", "patch", "trainjobs", "--as=ann"))
    for user in ("ann", "bob"):
        assert "job" in namespace.run("get", "trainjobs", f"--as={user}")
        for options in (("--namespace", other.namespace), ("--all-namespaces",)):
            with pytest.raises(KubectlError, match="forbidden"):
                cluster.kubectl.run("get", "trainjobs", f"--as={user}", *options)
    suspend = {"spec": {"suspend": True}}
    namespace.patch("trainjob", "job", suspend, "--as=ann")
    with pytest.raises(KubectlError, match="forbidden"):
        namespace.patch("trainjob", "job", suspend, "--as=bob")
    with pytest.raises(KubectlError, match="forbidden"):
        other.patch("trainjob", "job", suspend, "--as=ann")


def test_no_job_is_refused_during_an_upgrade_which_keeps_the_certificates(release: Release, namespace: Kubectl) -> None:
    before = state(release)
    options = (f"--namespace={release.kubectl.namespace}", "--reset-then-reuse-values", "--wait", "--timeout=2m")
    created = 0
    with ThreadPoolExecutor(1) as pool:
        upgrade = pool.submit(release.helm.run, "upgrade", RELEASE, str(CHART), *options, "--set=podAnnotations.a=b")
        while not upgrade.done():
            namespace.create(job(f"job-{created}"))
            created += 1
            time.sleep(0.2)
    assert "REVISION: 2" in upgrade.result()
    assert created > 1
    assert all(CHECKPOINTING_ANNOTATION in each["metadata"]["annotations"] for each in namespace.list("trainjobs"))
    assert state(release) == before
    pods = release.kubectl.list("pods", selector=f"app.kubernetes.io/name={NAME}")
    assert [pod["metadata"]["annotations"] for pod in pods if "deletionTimestamp" not in pod["metadata"]] == [
        {"a": "b"},
        {"a": "b"},
    ]


def state(release: Release) -> Object:
    """What the operator has written into objects of the chart."""
    secret = release.kubectl.get("secret", SECRET)
    configuration = release.cluster.kubectl.get("mutatingwebhookconfiguration", NAME)
    bundles = [webhook["clientConfig"]["caBundle"] for webhook in configuration["webhooks"]]
    return {"certificates": secret["data"], "bundles": bundles}


def test_an_uninstall_leaves_upstreams_definition_and_nothing_of_ours(release: Release) -> None:
    assert installed_objects(release.kubectl) > release.before
    release.uninstall()
    found = definition(release.cluster)
    assert found["spec"] == release.upstream["spec"]
    managers = {record["manager"] for record in found["metadata"]["managedFields"]}
    assert FIELD_MANAGER not in managers
    # The pods answer for some seconds. What they may still try, nobody lets them.
    release.kubectl.run("delete", "trainjobs", "--all")
    release.kubectl.run(
        "wait", "pods", "--all", "--for=delete", f"--timeout={GONE_WITHIN_S}s", timeout_s=GONE_WITHIN_S + 10
    )
    until(lambda: installed_objects(release.kubectl) == release.before, limit_s=GONE_WITHIN_S)
    assert definition(release.cluster)["spec"] == release.upstream["spec"], f"{CRD} stays as it was"
