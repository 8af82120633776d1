"""One replica leads: never two at a time, and soon another one when it is gone."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from reprieve.kubernetes.api import KubernetesApi
from reprieve.operator.controller import leader as leader_module
from reprieve.operator.controller.leader import LeaderElection
from tests.support.kubernetes_server import KubernetesServer

LEASE_S, RENEW_S, GIVE_UP_S = 2, 0.2, 1.2
WITHIN_S = 15.0


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[KubernetesServer]:
    for name, value in (("LEASE_S", LEASE_S), ("RENEW_S", RENEW_S), ("GIVE_UP_S", GIVE_UP_S), ("REQUEST_S", 0.5)):
        monkeypatch.setattr(leader_module, name, value)
    with KubernetesServer(tmp_path) as server:
        yield server


class Replica:
    """Takes part in the election until it is stopped, or killed."""

    leaders: list[str]

    def __init__(self, name: str, leaders: list[str]) -> None:
        self.name = name
        self.leaders = leaders
        """Those that lead now."""
        self.most = 0
        self.api = KubernetesApi()
        self.election = LeaderElection(self.api, name="operator", namespace="system", identity=name)
        self.task = asyncio.create_task(self.election.run(self._lead))

    async def _lead(self) -> None:
        self.leaders.append(self.name)
        assert len(self.leaders) == 1, self.leaders
        try:
            await asyncio.Event().wait()
        finally:
            self.leaders.remove(self.name)

    async def stop(self) -> None:
        self.task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self.task
        await self.api.close()

    async def kill(self) -> None:
        """As SIGKILL: the lease is not given back."""

        async def refuse() -> None:
            raise asyncio.TimeoutError

        self.election._give_back = refuse  # type: ignore[method-assign]
        await self.stop()


def play(scenario: Callable[[list[str]], Awaitable[None]]) -> None:
    async def run() -> None:
        await scenario([])

    asyncio.run(run())


async def until(condition: Callable[[], bool], within_s: float = WITHIN_S) -> float:
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < within_s
        await asyncio.sleep(0.01)
    return time.monotonic() - began


def test_one_of_three_leads_and_the_record_names_it(server: KubernetesServer) -> None:
    async def scenario(leaders: list[str]) -> None:
        replicas = [Replica(name, leaders) for name in "abc"]
        await until(lambda: len(leaders) == 1)
        await asyncio.sleep(2 * LEASE_S)
        assert len(leaders) == 1
        spec = server.get("leases", "operator", "system")["spec"]
        assert (spec["holderIdentity"], spec["leaseTransitions"]) == (leaders[0], 0)
        assert sum(each.election.is_leader for each in replicas) == 1
        await asyncio.gather(*(each.stop() for each in replicas))

    play(scenario)


def test_who_stops_hands_over_at_once(server: KubernetesServer) -> None:
    async def scenario(leaders: list[str]) -> None:
        first = Replica("first", leaders)
        await until(lambda: leaders == ["first"])
        second = Replica("second", leaders)
        await asyncio.sleep(2 * RENEW_S)
        await first.stop()
        assert await until(lambda: leaders == ["second"]) < LEASE_S / 2
        assert server.get("leases", "operator", "system")["spec"]["leaseTransitions"] >= 1
        await second.stop()

    play(scenario)


def test_who_is_killed_is_followed_when_the_lease_is_over(server: KubernetesServer) -> None:
    async def scenario(leaders: list[str]) -> None:
        first = Replica("first", leaders)
        await until(lambda: leaders == ["first"])
        second = Replica("second", leaders)
        await asyncio.sleep(2 * RENEW_S)
        await first.kill()
        took = await until(lambda: leaders == ["second"])
        assert LEASE_S - 1 < took < LEASE_S + 2
        await second.stop()

    play(scenario)


def test_who_cannot_renew_stops_before_anybody_may_follow(server: KubernetesServer) -> None:
    async def scenario(leaders: list[str]) -> None:
        replica = Replica("first", leaders)
        await until(lambda: leaders == ["first"])
        await asyncio.to_thread(server.stop)
        assert await until(lambda: not leaders) < LEASE_S
        assert not replica.election.is_leader
        server.start()
        await until(lambda: leaders == ["first"])
        await replica.stop()

    play(scenario)


def test_who_gets_no_answer_stops_before_anybody_may_follow(
    server: KubernetesServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leader_module, "REQUEST_S", 10.0)

    async def scenario(leaders: list[str]) -> None:
        replica = Replica("first", leaders)
        await until(lambda: leaders == ["first"])
        server.slow_s = 2.0 * LEASE_S
        assert await until(lambda: not leaders) < LEASE_S
        server.slow_s = 0.0
        await replica.stop()

    play(scenario)


def test_who_sees_another_holder_stops(server: KubernetesServer) -> None:
    async def scenario(leaders: list[str]) -> None:
        replica = Replica("first", leaders)
        await until(lambda: leaders == ["first"])
        lease = server.get("leases", "operator", "system")
        server.put("leases", {**lease, "spec": {**lease["spec"], "holderIdentity": "somebody"}})
        assert await until(lambda: not leaders) < GIVE_UP_S
        await until(lambda: leaders == ["first"])  # `somebody` never renews
        await replica.stop()

    play(scenario)


def test_what_leads_and_ends_by_itself_ends_the_election_with_its_error(server: KubernetesServer) -> None:
    async def lead() -> None:
        raise ValueError("a defect")

    async def run() -> None:
        async with KubernetesApi() as api:
            await LeaderElection(api, name="operator", namespace="system", identity="one").run(lead)

    with pytest.raises(ValueError, match="a defect"):
        asyncio.run(run())
    assert server.get("leases", "operator", "system")["spec"]["holderIdentity"] == "", "it is given back"
