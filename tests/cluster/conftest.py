"""Fixtures of the tests on a cluster: the cluster of the session, a namespace for each test, a watch over its pods."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import secrets
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.kit.cluster import Cluster, session_cluster
from tests.cluster.kit.objects import HOST_PATH, Object, pod_spec, reprieve_runtime, volume
from tests.cluster.kit.operator_deployment import Operator, deployed
from tests.cluster.kit.pod_watch import PodWatch
from tests.cluster.rig.kubectl import Kubectl, KubectlError
from tests.support.launch_kit import Lab
from tests.support.places import ROOT

_FAILED = pytest.StashKey[bool]()
LOG_LINES = 60
SET_UP_S = {"cluster": 900, "operator": 300, "image": 300}
"""What the fixtures of the session may take, in addition to the limit of the test that is the first to use them."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Remember failures for fixtures: pytest does not pass a test's exception on to them."""
    report = yield
    item.stash[_FAILED] = item.stash.get(_FAILED, False) or report.failed
    return report


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Give the first test that uses a session's fixture the time to set it up: the cluster may have to be compiled."""
    for fixture, set_up_s in SET_UP_S.items():
        first = next((item for item in items if fixture in getattr(item, "fixturenames", ())), None)
        if first is not None:
            marker = first.get_closest_marker("timeout")
            limit_s = marker.args[0] if marker is not None else float(config.getini("timeout"))
            first.add_marker(pytest.mark.timeout(limit_s + set_up_s), append=False)


@pytest.fixture(scope="session")
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """A running cluster, with Kueue if a test of the session needs it."""
    markers = {mark.name for item in request.session.items for mark in item.iter_markers()}
    compile_imports("torch.distributed.run", "tests.support.jobs.launch_job", "reprieve.launch.launcher")
    if "full" in markers:
        compile_imports("transformers.trainer", "peft")
    with session_cluster(full="kueue" in markers) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def operator(cluster: Cluster) -> Iterator[Operator]:
    """The operator of this checkout, deployed for the session."""
    compile_imports("reprieve.operator.run", "reprieve.cli.operator")
    with deployed(cluster) as operator:
        yield operator


def compile_imports(*modules: str) -> None:
    """Write the byte code of what the pods import. They cannot, because they mount the environment read-only, and
    without it each of them compiles torch: 4 s of CPU time instead of 2, and 11 instead of 6 for a Trainer."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-c", f"import {', '.join(modules)}"]
    subprocess.run(command, cwd=ROOT, env=environment, check=True)


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


@pytest.fixture(scope="module")
def runtime(cluster: Cluster) -> Iterator[Object]:
    """The runtime that the examples name, with the Python of this checkout."""
    spec = pod_spec(container="node", with_host_python=True, environment={"PATH": HOST_PATH})
    runtime = reprieve_runtime("reprieve-torch", spec, max_restarts=1)
    runtime["kind"] = "ClusterTrainingRuntime"
    cluster.kubectl.apply(runtime)
    yield runtime
    cluster.kubectl.delete("clustertrainingruntime", "reprieve-torch")


@pytest.fixture
def pods(namespace: Kubectl, request: pytest.FixtureRequest) -> Iterator[PodWatch]:
    """The record of all pods of the test. If it fails, its output has the record and the pods' logs."""
    with PodWatch(namespace) as watch:
        yield watch
        if request.node.stash.get(_FAILED, False):
            print(f"Pods until then:\n{watch.history()}")
            for pod in watch.latest():
                if not pod.is_gone:
                    print(f"--- log of {pod.name}, last {LOG_LINES} lines")
                    with contextlib.suppress(KubectlError):
                        print(namespace.logs(pod.name, f"--tail={LOG_LINES}"))


@pytest.fixture
def bind(namespace: Kubectl, cluster: Cluster, tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """A function that gives a claim of the namespace a folder."""
    made: list[str] = []

    def bind(claim: str) -> Path:
        folder = tmp_path / claim
        folder.mkdir(exist_ok=True)
        found = volume(namespace.namespace, claim, folder)
        cluster.kubectl.apply(found)
        made.append(found["metadata"]["name"])
        return folder

    yield bind
    for name in made:
        cluster.kubectl.delete("persistentvolume", name, wait=False)


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Lab]:
    """Run a job of two ranks that nothing disturbs, on this machine: once for all tests with the same options."""

    @functools.cache
    def run(**options: Any) -> Lab:
        lab = Lab(tmp_path_factory.mktemp("undisturbed"))
        ended = lab.run(lab.torchrun(2, **options))
        assert ended.code == 0, str(ended)
        return lab

    return run
