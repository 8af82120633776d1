"""One replica leads: never two at a time, and soon another one when it is gone."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from reprieve.kubernetes.api import KubernetesApi
from reprieve.operator.controller import leader as leader_module
from reprieve.operator.controller.leader import LeaderElection
from tests.support.kubernetes_server import KubernetesServer

RENEW_S = 0.2
WITHIN_S = 15.0


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[KubernetesServer]:
    monkeypatch.setattr(leader_module, "RENEW_S", RENEW_S)
    monkeypatch.setattr(leader_module, "REQUEST_S", 0.5)
    with KubernetesServer(tmp_path) as server:
        yield server


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, float], None]:
    """Sets how long a lease lasts, and when its holder gives up. A test compares what lies far apart: the machine may
    be busy."""

    def set_limits(lease_s: int, give_up_s: float) -> None:
        monkeypatch.setattr(leader_module, "LEASE_S", lease_s)
        monkeypatch.setattr(leader_module, "GIVE_UP_S", give_up_s)

    return set_limits


Limits = Callable[[int, float], None]


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


async def until(condition: Callable[[], bool], within_s: float = WITHIN_S) -> None:
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < within_s
        await asyncio.sleep(0.01)


def record(server: KubernetesServer) -> dict[str, Any]:
    spec: dict[str, Any] = server.get("leases", "operator", "system")["spec"]
    return spec


def time_of(text: str) -> datetime:
    return datetime.strptime(text, "%Y-%m-%dT%H:%M:%S.%f%z")


def test_one_of_three_leads_and_the_record_names_it(server: KubernetesServer, limits: Limits) -> None:
    limits(4, 3.5)

    async def scenario(leaders: list[str]) -> None:
        replicas = [Replica(name, leaders) for name in "abc"]
        await until(lambda: len(leaders) == 1)
        await asyncio.sleep(5)  # longer than a lease that is not renewed
        assert len(leaders) == 1
        spec = record(server)
        assert (spec["holderIdentity"], spec["leaseTransitions"]) == (leaders[0], 0)
        assert sum(each.election.is_leader for each in replicas) == 1
        await asyncio.gather(*(each.stop() for each in replicas))

    play(scenario)


def test_who_stops_hands_over_at_once(server: KubernetesServer, limits: Limits) -> None:
    limits(60, 50)

    async def scenario(leaders: list[str]) -> None:
        first = Replica("first", leaders)
        await until(lambda: leaders == ["first"])
        second = Replica("second", leaders)
        await asyncio.sleep(2 * RENEW_S)
        await first.stop()
        await until(lambda: leaders == ["second"])  # the lease would last much longer
        assert record(server)["leaseTransitions"] >= 1
        await second.stop()

    play(scenario)


def test_who_is_killed_is_followed_when_the_lease_is_over(server: KubernetesServer, limits: Limits) -> None:
    limits(2, 1.2)

    async def scenario(leaders: list[str]) -> None:
        first = Replica("first", leaders)
        await until(lambda: leaders == ["first"])
        second = Replica("second", leaders)
        await asyncio.sleep(2 * RENEW_S)
        await first.kill()
        renewed = time_of(record(server)["renewTime"])
        await until(lambda: leaders == ["second"])
        assert time_of(record(server)["acquireTime"]) - renewed >= timedelta(seconds=2)
        await second.stop()

    play(scenario)


def test_who_cannot_renew_stops_before_anybody_may_follow(server: KubernetesServer, limits: Limits) -> None:
    limits(14, 1.2)

    async def scenario(leaders: list[str]) -> None:
        replica = Replica("first", leaders)
        await until(lambda: leaders == ["first"])
        await asyncio.to_thread(server.stop)
        await until(lambda: not leaders, within_s=14)
        assert not replica.election.is_leader
        server.start()
        await until(lambda: leaders == ["first"])
        await replica.stop()

    play(scenario)


def test_who_gets_no_answer_stops_before_anybody_may_follow(
    server: KubernetesServer, limits: Limits, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits(14, 1.2)
    monkeypatch.setattr(leader_module, "REQUEST_S", 20.0)

    async def scenario(leaders: list[str]) -> None:
        replica = Replica("first", leaders)
        await until(lambda: leaders == ["first"])
        server.slow_s = 20.0
        await until(lambda: not leaders, within_s=14)
        server.slow_s = 0.0
        await replica.stop()

    play(scenario)


def test_who_sees_another_holder_stops(server: KubernetesServer, limits: Limits) -> None:
    limits(2, 60)

    async def scenario(leaders: list[str]) -> None:
        replica = Replica("first", leaders)
        await until(lambda: leaders == ["first"])
        lease = server.get("leases", "operator", "system")
        server.put("leases", {**lease, "spec": {**lease["spec"], "holderIdentity": "somebody"}})
        await until(lambda: not leaders)  # it would not give up by itself
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
