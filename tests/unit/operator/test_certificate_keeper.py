"""The Secret, the caBundle and the served certificate stay in step, with two replicas and an API server that fails."""

from __future__ import annotations

import asyncio
import base64
import ssl
from collections.abc import Callable, Coroutine, Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from reprieve.errors import ApiUnreachable, ConfigError
from reprieve.kubernetes.api import KubernetesApi
from reprieve.operator.certificate_files import CertificateFiles
from reprieve.operator.certificate_keeper import CertificateKeeper, service_names
from reprieve.operator.certificates import decode_pairs, make_pair
from reprieve.operator.serving_context import ServingContext
from tests.support.kubernetes_server import KubernetesServer

START = datetime(2026, 1, 1, tzinfo=timezone.utc)
LIFE = timedelta(days=90)
CONFIGURATIONS = "mutatingwebhookconfigurations"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[KubernetesServer]:
    with KubernetesServer(tmp_path) as server:
        put_configuration(server)
        yield server


def put_configuration(server: KubernetesServer) -> None:
    webhooks = [{"name": f"{name}.reprieve.dev", "clientConfig": {"service": {}}} for name in ("create", "update")]
    server.put(CONFIGURATIONS, {"metadata": {"name": "webhook"}, "webhooks": webhooks})


def bundles(server: KubernetesServer) -> list[str]:
    webhooks = server.get(CONFIGURATIONS, "webhook")["webhooks"]
    return [base64.b64decode(each["clientConfig"].get("caBundle", "")).decode() for each in webhooks]


def stored(server: KubernetesServer) -> list[str]:
    return [pair.certificate for pair in decode_pairs(server.get("secrets", "certificates", "system")["data"])]


class Replica:
    """A keeper with a clock of its own, and the certificate that it serves."""

    def __init__(self, api: KubernetesApi) -> None:
        self.now = START
        self.serving = ServingContext()
        self.keeper = CertificateKeeper(
            api,
            self.serving,
            namespace="system",
            secret="certificates",
            configuration="webhook",
            names=service_names("webhook", "system"),
            life=LIFE,
            now=lambda: self.now,
        )

    async def at(self, now: datetime) -> str:
        """Poll once at a time, and return the certificate that is served then."""
        self.now = now
        await self.keeper.sync()
        return await self.certificate()

    async def certificate(self) -> str:
        return await served_certificate(self.serving)


async def served_certificate(serving: ServingContext) -> str:
    """Take the certificate out of a real handshake."""
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0, ssl=serving.context)
    found = await asyncio.to_thread(ssl.get_server_certificate, server.sockets[0].getsockname())
    server.close()
    return found


def play(scenario: Callable[[Replica, Replica], Coroutine[Any, Any, None]]) -> None:
    """Run a scenario with two replicas, each with a client of its own."""

    async def run() -> None:
        async with KubernetesApi() as one, KubernetesApi() as other:
            await scenario(Replica(one), Replica(other))

    asyncio.run(run())


def test_the_first_replica_makes_the_secret_and_both_serve_what_is_in_it(server: KubernetesServer) -> None:
    async def scenario(first: Replica, second: Replica) -> None:
        assert first.keeper.missing() == "no certificate yet"
        served = await first.at(START)
        assert await second.at(START) == served
        assert stored(server) == [served]
        assert bundles(server) == [served, served]
        assert first.keeper.missing() == second.keeper.missing() == ""

    play(scenario)


def test_replicas_that_start_at_the_same_time_agree(server: KubernetesServer) -> None:
    async def scenario(first: Replica, second: Replica) -> None:
        await asyncio.gather(first.keeper.sync(), second.keeper.sync())
        assert await first.certificate() == await second.certificate()
        assert [await first.certificate()] == stored(server)

    play(scenario)


def test_a_renewal_is_trusted_before_it_is_served(server: KubernetesServer) -> None:
    async def scenario(first: Replica, second: Replica) -> None:
        old = await first.at(START)
        due = START + LIFE * 0.6
        assert await first.at(due) == old
        new = stored(server)[-1]
        assert new != old
        assert bundles(server) == [old + new] * 2
        assert await second.at(due + timedelta(seconds=59)) == old
        assert await first.at(due + timedelta(seconds=60)) == new
        assert await second.at(due + timedelta(seconds=60)) == new
        assert stored(server) == [old, new], "the other one is made once"

    play(scenario)


def test_an_expired_certificate_leaves_the_secret_and_the_bundle(server: KubernetesServer) -> None:
    async def scenario(first: Replica, _: Replica) -> None:
        old = await first.at(START)
        await first.at(START + LIFE * 0.7)
        new = stored(server)[-1]
        await first.at(START + LIFE * 1.31)
        assert old not in stored(server) and new in stored(server)
        assert old not in bundles(server)[0] and new in bundles(server)[0]

    play(scenario)


def test_a_ca_bundle_that_somebody_has_removed_is_written_again(server: KubernetesServer) -> None:
    async def scenario(first: Replica, _: Replica) -> None:
        served = await first.at(START)
        put_configuration(server)
        assert bundles(server) == ["", ""]
        await first.at(START)
        assert bundles(server) == [served, served]

    play(scenario)


def test_an_older_view_never_replaces_a_newer_bundle(server: KubernetesServer) -> None:
    """One replica has read the configuration, then the other renews. The write of the first fails: it reads again."""

    async def scenario(first: Replica, second: Replica) -> None:
        old = await first.at(START)
        put_configuration(server)  # so that the first has something to write
        read = first.keeper._current_pairs

        async def overtaken() -> Any:
            pairs = await read()
            first.keeper._current_pairs = read  # type: ignore[method-assign]
            await second.at(START + LIFE * 0.6)
            return pairs

        first.keeper._current_pairs = overtaken  # type: ignore[method-assign]
        await first.at(START + LIFE * 0.59)
        assert bundles(server) == [old + stored(server)[-1]] * 2

    play(scenario)


def test_without_the_api_server_the_next_certificate_is_still_served_in_time(server: KubernetesServer) -> None:
    async def scenario(first: Replica, _: Replica) -> None:
        old = await first.at(START)
        await first.at(START + LIFE * 0.6)
        new = stored(server)[-1]
        assert await first.certificate() == old
        server.stop()
        first.now = START + LIFE * 0.7
        with pytest.raises(ApiUnreachable):
            await first.keeper.sync()
        assert await first.certificate() == new
        assert first.keeper.missing() == ""
        first.now = START + LIFE * 2
        assert first.keeper.missing() == "no certificate yet"

    play(scenario)


def test_without_a_webhook_configuration_the_replica_is_not_ready(server: KubernetesServer) -> None:
    async def scenario(first: Replica, _: Replica) -> None:
        del server.objects[CONFIGURATIONS, "", "webhook"]
        await first.at(START)
        assert first.keeper.missing() == "the caBundle of webhook is not written yet"

    play(scenario)


def test_a_secret_that_cannot_be_read_is_replaced(server: KubernetesServer) -> None:
    async def scenario(first: Replica, _: Replica) -> None:
        damaged = {"metadata": {"name": "certificates", "namespace": "system"}, "data": {"pairs.json": "???"}}
        server.put("secrets", damaged)
        assert stored(server) == []
        assert [await first.at(START)] == stored(server)

    play(scenario)


def test_given_certificates_are_loaded_again_when_their_files_change(tmp_path: Path) -> None:
    serving = ServingContext()
    files = CertificateFiles(tmp_path, serving)
    with pytest.raises(ConfigError, match=r"No such file .*tls.crt; the Secret needs tls.crt and tls.key"):
        files.sync()
    assert "no certificate" in files.missing()
    for _ in range(2):
        pair = make_pair(["webhook.system.svc"], START)
        (tmp_path / "tls.crt").write_text(pair.certificate)
        (tmp_path / "tls.key").write_text(pair.key)
        files.sync()
        assert asyncio.run(served_certificate(serving)) == pair.certificate
    assert files.missing() == ""


def test_a_certificate_whose_key_is_another_one_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tls.crt").write_text(make_pair(["a"], START).certificate)
    (tmp_path / "tls.key").write_text(make_pair(["a"], START).key)
    with pytest.raises(ConfigError, match="cannot be used together"):
        CertificateFiles(tmp_path, ServingContext()).sync()
