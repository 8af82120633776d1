"""Ranks that a framework provides come before all variables."""

from __future__ import annotations

import threading

import pytest

from reprieve.ranks import discovery
from reprieve.ranks.group import Ranks
from tests.support.memory_store import MemoryStore


@pytest.fixture(autouse=True)
def _not_provided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "_provided", None)


def test_what_a_framework_provides_comes_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("REPRIEVE_STORE", "not an address")
    discovery.provide(3, 4, MemoryStore())
    ranks = discovery.detect()
    assert (ranks.rank, ranks.world_size) == (3, 4)


def test_provided_ranks_agree_in_each_call_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sessions of one process have different keys, and the same ones as those of the other ranks."""
    store = MemoryStore()
    jobs: list[list[Ranks]] = []
    for rank in range(2):
        monkeypatch.setattr(discovery, "_calls", iter(range(10)))  # each rank is a process of its own
        discovery.provide(rank, 2, store.client())
        jobs.append([discovery.detect(), discovery.detect()])
    results: dict[tuple[int, int], list[str]] = {}

    def agree(rank: int, session: int) -> None:
        results[rank, session] = jobs[rank][session].agree("name", lambda: f"{rank} in session {session}")

    threads = [threading.Thread(target=agree, args=(rank, session)) for rank in range(2) for session in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    for rank in range(2):
        for session in range(2):
            assert results[rank, session] == [f"0 in session {session}", f"1 in session {session}"]


def test_a_provided_world_of_one_needs_no_store() -> None:
    discovery.provide(0, 1, MemoryStore())
    assert discovery.detect().agree("name", lambda: "alone") == ["alone"]


@pytest.mark.parametrize("pod_ip", ["10.0.0.7", "2001:db8::7"])
def test_a_pod_is_reached_by_its_address(monkeypatch: pytest.MonkeyPatch, pod_ip: str) -> None:
    """A pod with IPv6 alone has no other."""
    monkeypatch.setenv("POD_IP", f" {pod_ip}\n")
    assert discovery._own_address() == pod_ip


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", "127.0.0.1"),
        ("::1", "::1"),
        ("10.0.0.7", "0.0.0.0"),
        ("2001:db8::7", "::"),
        ("node-0.invalid", "0.0.0.0"),
    ],
)
def test_where_the_store_listens(host: str, expected: str) -> None:
    """On the loopback alone if all ranks are on this machine; otherwise in the family of the address."""
    assert discovery._listen_address(host) == expected


def test_closing_the_ranks_leaves_the_provided_store_open() -> None:
    store = MemoryStore()
    discovery.provide(0, 2, store)
    discovery.detect().close()
    store.set("key", b"value")
    assert store.get("key") == b"value"
