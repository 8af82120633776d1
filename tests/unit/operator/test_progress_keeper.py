"""How the operator gets to rank 0: from pod to pod, and where that fails and the chart allows it, by the API server."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import Iterator
from pathlib import Path

import pytest

from reprieve.kubernetes.api import KubernetesApi
from reprieve.operator.controller.pod_request import NoAnswer
from reprieve.operator.progress_keeper import ProgressKeeper, ProgressMode
from reprieve.operator.status.objects import ObservedPod, pod_of
from tests.support.status_controller_kit import JobServer, PodServer, http_answer

PATH = "/trainingProgress"


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[JobServer]:
    with JobServer(tmp_path) as server:
        yield server


def ask(cluster: JobServer, pod: str, mode: ProgressMode) -> bytes:
    async def run() -> bytes:
        async with KubernetesApi() as api:
            return await ProgressKeeper(api, mode, lease="operator").ask(observed(cluster, pod), PATH)

    return asyncio.run(run())


def observed(cluster: JobServer, pod: str) -> ObservedPod:
    found = pod_of(cluster.get("pods", pod, "team"))
    assert found is not None
    return found


def through_the_api_server(cluster: JobServer, content: bytes) -> str:
    """A pod that answers there only. Return its name."""
    pod = cluster.add_pod(None)
    cluster.answers[f"{pod}:{observed(cluster, pod).port}{PATH}"] = content
    return pod


@pytest.mark.parametrize("mode", [ProgressMode.DIRECT, ProgressMode.PROXY])
def test_a_pod_that_can_be_reached_is_asked_itself(cluster: JobServer, mode: ProgressMode) -> None:
    with PodServer(http_answer(b"{}")) as pod:
        assert ask(cluster, cluster.add_pod(pod), mode) == b"{}"
    assert cluster.requests == []


def test_a_pod_that_cannot_be_reached_is_asked_through_the_api_server(cluster: JobServer) -> None:
    pod = through_the_api_server(cluster, b"{}")
    assert ask(cluster, pod, ProgressMode.PROXY) == b"{}"
    with pytest.raises(NoAnswer, match=r"refused|Connect call failed"):
        ask(cluster, pod, ProgressMode.DIRECT)
    assert len(cluster.requests) == 1


def test_why_neither_way_leads_to_the_pod(cluster: JobServer) -> None:
    cluster.forbidden.add("pods/proxy")
    with pytest.raises(NoAnswer, match=r"(refused|Connect call failed).*; through the API server: .*pods is forbidden"):
        ask(cluster, cluster.add_pod(None), ProgressMode.PROXY)


def test_an_answer_is_not_unpacked(cluster: JobServer) -> None:
    bomb = gzip.compress(bytes(50_000_000))
    assert ask(cluster, through_the_api_server(cluster, bomb), ProgressMode.PROXY) == bomb
