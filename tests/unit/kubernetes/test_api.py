"""The client of the Kubernetes API, against a server in memory: what comes back, and which errors are raised."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from reprieve.errors import (
    ApiUnreachable,
    ConfigError,
    KubernetesError,
    NotPermitted,
    ObjectChanged,
    ObjectNotFound,
)
from reprieve.kubernetes.api import KubernetesApi
from reprieve.kubernetes.kinds import CUSTOM_RESOURCE_DEFINITION, SECRET, Event
from tests.support.kubernetes_server import KubernetesServer

T = TypeVar("T")
CRDS = "customresourcedefinitions"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[KubernetesServer]:
    with KubernetesServer(tmp_path) as server:
        yield server


def secret(name: str = "s", **data: str) -> dict[str, Any]:
    return {"metadata": {"name": name, "namespace": "system"}, "data": data}


def crd(name: str = "trainjobs", columns: int = 1) -> dict[str, Any]:
    return {"metadata": {"name": name}, "spec": {"columns": columns}}


def use(scenario: Callable[[KubernetesApi], Awaitable[T]], **options: Any) -> T:
    async def run() -> T:
        async with KubernetesApi(**options) as api:
            return await scenario(api)

    return asyncio.run(run())


def test_objects_are_plain_dictionaries(server: KubernetesServer) -> None:
    server.put("secrets", secret(a="1"))
    found = use(lambda api: api.get(SECRET, "s"))
    assert type(found) is dict
    assert found["data"] == {"a": "1"}


def test_the_namespace_is_that_of_the_context(server: KubernetesServer) -> None:
    assert use(_namespace) == "system"
    assert use(_namespace, namespace="other") == "other"


async def _namespace(api: KubernetesApi) -> str:
    return api.namespace


def test_writing_is_recorded_under_the_field_manager(server: KubernetesServer) -> None:
    use(lambda api: api.create(SECRET, secret(), namespace="system"), field_manager="reprieve.dev/test")
    assert server.get("secrets", "s", "system")["metadata"]["managedFields"][0]["manager"] == "reprieve.dev/test"


def test_an_object_that_is_not_there(server: KubernetesServer) -> None:
    with pytest.raises(ObjectNotFound, match='cannot get Secret s: secrets "s" not found'):
        use(lambda api: api.get(SECRET, "s"))


def test_creating_what_is_there(server: KubernetesServer) -> None:
    server.put("secrets", secret())
    with pytest.raises(ObjectChanged, match="already exists"):
        use(lambda api: api.create(SECRET, secret()))


def test_replacing_what_has_changed_since_it_was_read(server: KubernetesServer) -> None:
    before = server.put("secrets", secret(a="1"))
    server.put("secrets", secret(a="2"))
    with pytest.raises(ObjectChanged, match="cannot replace Secret s"):
        use(lambda api: api.replace(SECRET, {**before, "data": {"a": "3"}}))
    assert server.get("secrets", "s", "system")["data"] == {"a": "2"}


def test_a_json_patch_changes_an_object(server: KubernetesServer) -> None:
    server.put(CRDS, crd())
    operations = [
        {"op": "test", "path": "/spec/columns", "value": 1},
        {"op": "add", "path": "/spec/columns", "value": 2},
    ]
    found = use(lambda api: api.json_patch(CUSTOM_RESOURCE_DEFINITION, "trainjobs", operations))
    assert found["spec"] == {"columns": 2} == server.get(CRDS, "trainjobs")["spec"]


def test_a_json_patch_whose_test_fails_is_a_conflict(server: KubernetesServer) -> None:
    server.put(CRDS, crd())
    operations = [{"op": "test", "path": "/spec/columns", "value": 9}]
    with pytest.raises(ObjectChanged, match="cannot patch CustomResourceDefinition trainjobs"):
        use(lambda api: api.json_patch(CUSTOM_RESOURCE_DEFINITION, "trainjobs", operations))


def test_missing_permissions_are_named(server: KubernetesServer) -> None:
    server.forbidden.add("secrets")
    with pytest.raises(NotPermitted, match='User "tester" cannot GET secrets'):
        use(lambda api: api.get(SECRET, "s"))


def test_a_server_that_is_away(server: KubernetesServer) -> None:
    server.stop()
    with pytest.raises(ApiUnreachable, match="cannot get Secret s: the API server does not answer"):
        use(lambda api: api.get(SECRET, "s"))


def test_a_server_that_is_slow(server: KubernetesServer) -> None:
    server.slow_s = 1.0
    with pytest.raises(ApiUnreachable):
        use(lambda api: api.get(SECRET, "s"), timeout_s=0.1)


def test_a_watch_continues_from_a_list(server: KubernetesServer) -> None:
    server.put(CRDS, crd())
    server.put(CRDS, crd("other"))

    async def scenario(api: KubernetesApi) -> list[Event]:
        found, version = await api.list_objects(CUSTOM_RESOURCE_DEFINITION, name="trainjobs")
        assert [each["metadata"]["name"] for each in found] == ["trainjobs"]
        server.put(CRDS, crd("other", columns=5))
        server.put(CRDS, crd(columns=2))
        events = []
        async for event in api.watch(CUSTOM_RESOURCE_DEFINITION, name="trainjobs", resource_version=version):
            events.append(event)
            if event.object["spec"]["columns"] == 3:
                break
            server.put(CRDS, crd(columns=3))
        return events

    found = use(scenario)
    assert [(event.type, event.object["spec"]["columns"]) for event in found] == [("MODIFIED", 2), ("MODIFIED", 3)]


def watch_until_it_ends(server: KubernetesServer) -> None:
    async def scenario(api: KubernetesApi) -> None:
        async for _ in api.watch(CUSTOM_RESOURCE_DEFINITION, resource_version="1"):
            server.stop()

    use(scenario)


def test_a_watch_from_a_version_that_is_too_old(server: KubernetesServer) -> None:
    server.oldest = 50
    with pytest.raises(KubernetesError, match="too old resource version"):
        watch_until_it_ends(server)


def test_a_watch_whose_server_goes_away(server: KubernetesServer) -> None:
    server.put(CRDS, crd())
    with pytest.raises(ApiUnreachable):
        watch_until_it_ends(server)


def test_a_watch_on_a_server_that_never_answers_again(
    server: KubernetesServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a node loses its power: no connection is closed."""
    monkeypatch.setattr("reprieve.kubernetes.api.WATCH_MARGIN_S", 1.0)

    async def scenario(api: KubernetesApi) -> str:
        async for _ in api.watch(CUSTOM_RESOURCE_DEFINITION, resource_version="100", seconds=0):
            return "an event"
        return "ended"

    server.slow_s = 5.0
    assert use(scenario) == "ended"


def test_no_cluster_to_connect_to(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    with pytest.raises(ConfigError, match=r"no cluster to connect to: .*none not found; set KUBECONFIG"):
        KubernetesApi()


def test_a_context_that_is_not_in_the_kubeconfig(server: KubernetesServer) -> None:
    with pytest.raises(ConfigError, match="Context 'production' not found"):
        KubernetesApi(context="production")


def test_a_context_whose_cluster_is_not_in_the_kubeconfig(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "kubeconfig"
    path.write_text(
        '{"clusters": [], "contexts": [{"name": "a", "context": {"cluster": "gone"}}], "current-context": "a"}'
    )
    monkeypatch.setenv("KUBECONFIG", str(path))
    with pytest.raises(ConfigError, match="the kubeconfig is incomplete: KeyError: 'gone'"):
        KubernetesApi()
