"""spec.checkpointing stays in the resource definition, whatever happens to it and to the watch."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from reprieve.kubernetes.api import KubernetesApi
from reprieve.kubernetes.crd import CRD_NAME
from reprieve.kubernetes.crd_install import FIELD_MANAGER, install, missing_parts, remove
from reprieve.operator import crd_keeper
from reprieve.operator.crd_keeper import CrdKeeper
from tests.support.kubernetes_server import KubernetesServer
from tests.support.train_job_crd import upstream_definition

CRDS = "customresourcedefinitions"
WITHIN_S = 5.0
"""How soon our part must be back."""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[KubernetesServer]:
    with KubernetesServer(tmp_path) as server:
        yield server


def upstream(server: KubernetesServer) -> None:
    """As Trainer's installation writes the definition."""
    server.put(CRDS, upstream_definition(), manager="trainer")


def use(scenario: Callable[[KubernetesApi], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        async with KubernetesApi(field_manager=FIELD_MANAGER) as api:
            return await scenario(api)

    return asyncio.run(run())


def keep(scenario: Callable[[KubernetesApi], Awaitable[None]], keepers: int = 1) -> None:
    """Run a scenario while keepers run, each with a client of its own."""

    async def run() -> None:
        async with contextlib.AsyncExitStack() as stack:
            clients = [
                await stack.enter_async_context(KubernetesApi(field_manager=FIELD_MANAGER)) for _ in range(keepers + 1)
            ]
            tasks = [asyncio.create_task(CrdKeeper(api).run()) for api in clients[1:]]
            await scenario(clients[0])
            assert not any(task.done() for task in tasks)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(run())


async def until(condition: Callable[[], bool], within_s: float = WITHIN_S) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


def is_ours(server: KubernetesServer) -> bool:
    """Our part is there, and no record says that it is ours: Trainer's next apply must not conflict."""
    crd = server.get(CRDS, CRD_NAME)
    properties = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]
    managers = [record["manager"] for record in crd["metadata"]["managedFields"]]
    return "checkpointing" in properties["spec"]["properties"] and FIELD_MANAGER not in managers


def test_install_and_remove(server: KubernetesServer) -> None:
    upstream(server)
    before = copy.deepcopy(server.get(CRDS, CRD_NAME)["spec"])
    assert use(missing_parts) != []
    assert use(install) is True
    assert is_ours(server)
    assert use(missing_parts) == []
    assert use(install) is False
    assert use(remove) is True
    assert server.get(CRDS, CRD_NAME)["spec"] == before
    assert use(remove) is False
    assert [record["manager"] for record in server.get(CRDS, CRD_NAME)["metadata"]["managedFields"]] == ["trainer"]


def test_nothing_is_to_be_removed_where_trainer_is_gone(server: KubernetesServer) -> None:
    assert use(remove) is False


def test_an_upgrade_of_trainer_is_repaired(server: KubernetesServer) -> None:
    async def scenario(_: KubernetesApi) -> None:
        await until(lambda: is_ours(server))
        upstream(server)
        await until(lambda: is_ours(server))

    upstream(server)
    keep(scenario)


def test_two_replicas_do_not_disturb_each_other(server: KubernetesServer) -> None:
    async def scenario(_: KubernetesApi) -> None:
        for _ in range(5):
            await until(lambda: is_ours(server))
            upstream(server)
        await until(lambda: is_ours(server))
        await until(lambda: server.quiet_s() > 0.5)  # each has seen all changes, and has nothing to do

    upstream(server)
    keep(scenario, keepers=2)


def test_trainer_that_is_installed_later(server: KubernetesServer) -> None:
    async def scenario(_: KubernetesApi) -> None:
        await asyncio.sleep(0.1)
        upstream(server)
        await until(lambda: is_ours(server))

    keep(scenario)


def test_a_change_while_the_server_is_away_is_found(server: KubernetesServer) -> None:
    async def scenario(_: KubernetesApi) -> None:
        await until(lambda: is_ours(server))
        server.stop()
        upstream(server)
        await asyncio.sleep(0.5)
        server.start()
        await until(lambda: is_ours(server))

    upstream(server)
    keep(scenario)


def test_a_watch_that_is_too_old_or_ends_starts_again(server: KubernetesServer) -> None:
    async def scenario(_: KubernetesApi) -> None:
        await until(lambda: is_ours(server))
        server.oldest = 10_000  # from now on each watch fails, so only lists find changes
        server.end_watches()
        upstream(server)
        await until(lambda: is_ours(server))
        server.oldest = 0
        server.end_watches()
        await asyncio.sleep(0.1)
        upstream(server)
        await until(lambda: is_ours(server))

    upstream(server)
    keep(scenario)


def test_a_definition_that_may_not_be_touched_is_left_alone(
    server: KubernetesServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(crd_keeper, "NOT_PERMITTED_RETRY_S", 0.1)

    async def scenario(_: KubernetesApi) -> None:
        await until(lambda: "only the annotation of TrainJobs works" in caplog.text)
        server.forbidden.clear()
        await until(lambda: is_ours(server))

    upstream(server)
    server.forbidden.add(CRDS)
    keep(scenario)


def test_a_definition_of_another_version_is_left_alone(
    server: KubernetesServer, caplog: pytest.LogCaptureFixture
) -> None:
    other = upstream_definition()
    other["spec"]["versions"][0]["name"] = "v2"

    async def scenario(_: KubernetesApi) -> None:
        await until(lambda: "has no version v1alpha1" in caplog.text)
        assert server.get(CRDS, CRD_NAME)["spec"] == other["spec"]

    server.put(CRDS, other)
    keep(scenario)
