"""Fixtures of the tests on a cluster: the cluster of the session, a namespace for each test, a watch over its pods."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator

import pytest

from tests.cluster.kit.cluster import Cluster, session_cluster
from tests.cluster.kit.pod_watch import PodWatch
from tests.cluster.rig.kubectl import Kubectl


@pytest.fixture(scope="session")
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """A running cluster, with Kueue if a test of the session needs it."""
    full = any(item.get_closest_marker("kueue") for item in request.session.items)
    with session_cluster(full=full) as cluster:
        yield cluster


@pytest.fixture
def namespace(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[Kubectl]:
    """A client for a new namespace, which is deleted after the test without waiting for its pods' grace periods."""
    test = re.sub(r"[^a-z0-9]+", "-", request.node.name.removeprefix("test_").lower())[:40].strip("-")
    name = f"{test}-{secrets.token_hex(3)}"
    cluster.kubectl.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
    cluster.kubectl.for_namespace(name).wait_for("serviceaccount", "default", lambda _: True)
    yield cluster.kubectl.for_namespace(name)
    cluster.kubectl.delete("namespace", name, wait=False)
    cluster.kubectl.for_namespace(name).run("delete", "pods", "--all", "--force", "--grace-period=0", "--wait=false")


@pytest.fixture
def pods(namespace: Kubectl) -> Iterator[PodWatch]:
    """The record of all pods of the test."""
    with PodWatch(namespace) as watch:
        yield watch
