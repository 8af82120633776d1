"""What all clients behind `Cluster` do alike, against a server in memory."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from reprieve.errors import ApiUnreachable, KubernetesError, NotPermitted, ObjectChanged, ObjectNotFound
from reprieve.kubernetes.jobs.api_cluster import ApiCluster
from reprieve.kubernetes.jobs.cluster import MOST_BYTES, Cluster
from reprieve.kubernetes.kinds import POD, TRAIN_JOB
from reprieve.kubernetes.pausing import MergePatch
from reprieve.sdk.sdk_cluster import SdkCluster
from tests.support.kubernetes_server import KubernetesServer

Object = dict[str, Any]


@contextlib.contextmanager
def over_lightkube() -> Iterator[Cluster]:
    with ApiCluster() as cluster:
        yield cluster


@contextlib.contextmanager
def over_the_sdks_client() -> Iterator[Cluster]:
    from kubernetes import config

    client = config.new_client_from_config(os.environ["KUBECONFIG"])
    yield SdkCluster(client, "system")
    client.close()


CLUSTERS: dict[str, Callable[[], contextlib.AbstractContextManager[Cluster]]] = {
    "lightkube": over_lightkube,
    "the SDK's client": over_the_sdks_client,
}
"""A client of a new kind is tested by a line here."""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[KubernetesServer]:
    with KubernetesServer(tmp_path) as server:
        yield server


@pytest.fixture(params=CLUSTERS)
def cluster(request: pytest.FixtureRequest, server: KubernetesServer) -> Iterator[Cluster]:
    with CLUSTERS[request.param]() as cluster:
        yield cluster


def job(name: str = "finetune", *, namespace: str = "system", suspend: bool = False) -> Object:
    return {"metadata": {"name": name, "namespace": namespace, "annotations": {"a": "1"}}, "spec": {"suspend": suspend}}


def pod(name: str, *, of: str = "finetune", phase: str = "Running", namespace: str = "system") -> Object:
    labels = {"jobset.sigs.k8s.io/jobset-name": of}
    return {"metadata": {"name": name, "namespace": namespace, "labels": labels}, "status": {"phase": phase}}


LABELS = {"jobset.sigs.k8s.io/jobset-name": "finetune"}


def test_the_namespace_is_that_of_the_context(cluster: Cluster) -> None:
    assert cluster.namespace == "system"


def test_an_object_is_a_plain_dictionary(cluster: Cluster, server: KubernetesServer) -> None:
    server.put("trainjobs", job())
    found = cluster.get(TRAIN_JOB, "finetune")
    assert (type(found), found["spec"]) == (dict, {"suspend": False})


def test_an_object_that_is_not_there(cluster: Cluster) -> None:
    with pytest.raises(ObjectNotFound, match='trainjobs "none" not found'):
        cluster.get(TRAIN_JOB, "none")


def test_a_kind_that_is_not_there(cluster: Cluster, server: KubernetesServer) -> None:
    server.missing.add("trainjobs")
    with pytest.raises(ObjectNotFound, match="could not find the requested resource"):
        cluster.list(TRAIN_JOB)


def test_a_list_has_the_objects_of_the_namespace_with_the_labels(cluster: Cluster, server: KubernetesServer) -> None:
    for each in (pod("a"), pod("b"), pod("another", of="another"), pod("elsewhere", namespace="elsewhere")):
        server.put("pods", each)
    assert [each["metadata"]["name"] for each in cluster.list(POD, labels=LABELS)[0]] == ["a", "b"]
    assert [each["metadata"]["name"] for each in cluster.list(POD)[0]] == ["a", "b", "another"]


def test_a_watch_continues_from_a_list(cluster: Cluster, server: KubernetesServer) -> None:
    server.put("pods", pod("a"))
    _, version = cluster.list(POD, labels=LABELS)
    server.put("pods", pod("another", of="another"))
    server.put("pods", pod("a", phase="Failed"))
    server.delete("pods", "a", "system")
    events = []
    for event in cluster.watch(POD, resource_version=version, labels=LABELS, seconds=5):
        events.append((event.type, event.object["metadata"]["name"], event.object["status"]["phase"]))
        if len(events) == 2:
            break
    assert events == [("MODIFIED", "a", "Failed"), ("DELETED", "a", "Failed")]


def test_a_watch_ends_when_its_time_is_over(cluster: Cluster) -> None:
    assert list(cluster.watch(POD, resource_version="100", seconds=1)) == []


def test_a_watch_from_a_version_that_is_too_old(cluster: Cluster, server: KubernetesServer) -> None:
    server.oldest = 500
    with pytest.raises(KubernetesError, match="too old resource version"):
        list(cluster.watch(POD, resource_version="100", seconds=5))


def test_a_patch_changes_what_it_names_and_removes_what_is_none(cluster: Cluster, server: KubernetesServer) -> None:
    version = server.put("trainjobs", job())["metadata"]["resourceVersion"]
    metadata = {"resourceVersion": version, "annotations": {"a": None, "b": "2"}}
    changed = cluster.patch(MergePatch(TRAIN_JOB, "finetune", {"metadata": metadata, "spec": {"suspend": True}}))
    assert changed["metadata"]["annotations"] == {"b": "2"}
    assert server.get("trainjobs", "finetune", "system")["spec"] == {"suspend": True}


def test_a_patch_of_what_has_changed_since_it_was_read(cluster: Cluster, server: KubernetesServer) -> None:
    version = server.put("trainjobs", job())["metadata"]["resourceVersion"]
    server.put("trainjobs", job(suspend=True))
    with pytest.raises(ObjectChanged, match="finetune"):
        cluster.patch(MergePatch(TRAIN_JOB, "finetune", {"metadata": {"resourceVersion": version}}))


def test_a_log(cluster: Cluster, server: KubernetesServer) -> None:
    server.put("pods", pod("a", phase="Failed"))
    server.logs["a"] = "first\nsecond: é\n"
    assert list(cluster.read_log("a", container="node")) == ["first", "second: é"]


def test_a_log_is_followed_until_the_pod_ends(cluster: Cluster, server: KubernetesServer) -> None:
    server.put("pods", pod("a"))
    server.logs["a"] = "first\n"
    lines = cluster.read_log("a", container="node", follow=True)
    assert next(lines) == "first"

    def end() -> None:
        server.logs["a"] += "second\n"
        server.put("pods", pod("a", phase="Failed"))

    timer = threading.Timer(0.2, end)
    timer.start()
    assert list(lines) == ["second"]
    timer.join()


@pytest.mark.parametrize("follow", [False, True])
def test_a_log_of_a_pod_that_is_not_there(cluster: Cluster, follow: bool) -> None:
    with pytest.raises(ObjectNotFound, match="not found"):
        list(cluster.read_log("a", container="node", follow=follow))


def test_what_a_pod_answers(cluster: Cluster, server: KubernetesServer) -> None:
    server.answers["a:28080/trainingProgress"] = b'{"step": 1}'
    assert cluster.get_from_pod("a", 28080, "/trainingProgress") == b'{"step": 1}'
    with pytest.raises(KubernetesError, match="connection refused"):
        cluster.get_from_pod("b", 28080, "/trainingProgress")


def test_a_pod_that_answers_without_end(cluster: Cluster, server: KubernetesServer) -> None:
    server.answers["a:28080/trainingProgress"] = b" " * (MOST_BYTES + 1)
    with pytest.raises(KubernetesError, match="longer than 262144 bytes"):
        cluster.get_from_pod("a", 28080, "/trainingProgress")


@pytest.mark.parametrize(
    ("forbidden", "request_of"),
    [
        ("trainjobs", lambda cluster: cluster.get(TRAIN_JOB, "finetune")),
        ("pods", lambda cluster: cluster.list(POD)),
        ("trainjobs", lambda cluster: cluster.patch(MergePatch(TRAIN_JOB, "finetune", {"spec": {}}))),
        ("pods/log", lambda cluster: list(cluster.read_log("a", container="node"))),
        ("pods/proxy", lambda cluster: cluster.get_from_pod("a", 28080, "/trainingProgress")),
    ],
    ids=["get", "list", "patch", "read_log", "get_from_pod"],
)
def test_missing_permissions_are_named(
    cluster: Cluster, server: KubernetesServer, forbidden: str, request_of: Callable[[Cluster], object]
) -> None:
    server.forbidden.add(forbidden)
    with pytest.raises(NotPermitted, match='User "tester" cannot'):
        request_of(cluster)


def test_a_server_that_is_away(cluster: Cluster, server: KubernetesServer) -> None:
    server.stop()
    with pytest.raises(ApiUnreachable):
        cluster.get(TRAIN_JOB, "finetune")
