"""What an informer knows is what exists, whatever happens to the watch and to the API server."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from reprieve.kubernetes.api import KubernetesApi
from reprieve.kubernetes.kinds import POD, Object
from reprieve.operator.controller import informer as informer_module
from reprieve.operator.controller.informer import Informer
from reprieve.operator.metrics.counters import Counters
from tests.support.kubernetes_server import KubernetesServer

WITHIN_S = 30.0


@dataclass(frozen=True)
class Kept:
    uid: str
    version: int
    name: str
    phase: str


def reduce(found: Object) -> Kept | None:
    metadata = found["metadata"]
    if metadata["name"].startswith("other"):
        return None
    if metadata["name"].startswith("broken"):
        raise OverflowError("a number that nobody thought of")
    return Kept(metadata["uid"], int(metadata["resourceVersion"]), metadata["name"], found.get("phase", ""))


@pytest.fixture
def server(tmp_path: Path) -> Iterator[KubernetesServer]:
    with KubernetesServer(tmp_path) as server:
        yield server


class Observer:
    """Plays a scenario while an informer runs."""

    def __init__(self, server: KubernetesServer) -> None:
        self.server = server
        self.counters = Counters()
        self.known: dict[str, str] = {}
        """Names and phases, as the calls say."""
        self.calls: list[str] = []

    def put(self, name: str, phase: str = "", **labels: str) -> None:
        metadata = {"name": name, "namespace": "team", "uid": f"{name}-uid", "labels": labels}
        self.server.put("pods", {"metadata": metadata, "phase": phase})

    def on_change(self, kept: Kept) -> None:
        self.calls.append(f"{kept.name} {kept.phase}".strip())
        self.known[kept.name] = kept.phase

    def on_delete(self, kept: Kept) -> None:
        self.calls.append(f"{kept.name} is gone")
        del self.known[kept.name]

    def play(self, scenario: Callable[[Informer[Kept]], Awaitable[None]], **options: object) -> None:
        async def run() -> None:
            async with KubernetesApi() as api:
                informer = Informer(
                    api,
                    POD,
                    reduce,
                    on_change=self.on_change,
                    on_delete=self.on_delete,
                    counters=self.counters,
                    **options,  # type: ignore[arg-type]
                )
                task = asyncio.create_task(informer.run())
                try:
                    await asyncio.wait_for(informer.has_synced.wait(), WITHIN_S)
                    await scenario(informer)
                    assert not task.done()
                finally:
                    task.cancel()
                    with contextlib.suppress(asyncio.CancelledError):
                        await task

        asyncio.run(run())

    async def until(self, **known: str) -> None:
        deadline = time.monotonic() + WITHIN_S
        while self.known != known:
            assert time.monotonic() < deadline, (self.known, self.calls)
            await asyncio.sleep(0.01)

    async def until_requests(self, count: int) -> None:
        deadline = time.monotonic() + WITHIN_S
        while len(self.server.requests) < count:
            assert time.monotonic() < deadline, self.server.requests
            await asyncio.sleep(0.01)

    @property
    def restarts(self) -> int:
        [count] = self.counters.of("watch_restarts").values()
        return count


def test_it_reports_what_is_there_and_what_changes(server: KubernetesServer) -> None:
    observer = Observer(server)
    observer.put("a")
    observer.put("other")

    async def scenario(informer: Informer[Kept]) -> None:
        assert observer.known == {"a": ""}
        observer.put("b", "Pending")
        await observer.until(a="", b="Pending")
        observer.put("b", "Running")
        await observer.until(a="", b="Running")
        server.delete("pods", "b", "team")
        await observer.until(a="")
        assert len(informer) == 1

    observer.play(scenario)
    assert observer.calls == ["a", "b Pending", "b Running", "b Running", "b is gone"]
    assert observer.restarts == 0


def test_only_objects_with_the_label_are_requested(server: KubernetesServer) -> None:
    observer = Observer(server)
    observer.put("plain")
    observer.put("labelled", job="train")

    async def scenario(_: Informer[Kept]) -> None:
        await observer.until(labelled="")

    observer.play(scenario, labels={"job": None})


def test_after_a_lost_connection_changes_and_deletions_are_found(server: KubernetesServer) -> None:
    observer = Observer(server)
    for name in ("stays", "changes", "goes"):
        observer.put(name)

    async def scenario(_: Informer[Kept]) -> None:
        await asyncio.sleep(0.2)  # the watch is open
        await asyncio.to_thread(server.stop)
        observer.put("changes", "Running")
        observer.put("comes")
        server.delete("pods", "goes", "team")
        await asyncio.sleep(0.5)  # refused connections
        server.start()
        await observer.until(stays="", changes="Running", comes="")

    observer.play(scenario)
    assert observer.calls.count("stays") == 1, "what has not changed is not reported again"
    assert observer.restarts >= 1


def test_a_version_that_is_too_old_lists_again(server: KubernetesServer) -> None:
    observer = Observer(server)
    observer.put("a")

    async def scenario(_: Informer[Kept]) -> None:
        server.oldest = 10**6
        server.end_watches()
        observer.put("b")
        await observer.until(a="", b="")
        server.oldest = 0

    observer.play(scenario)


def test_an_object_that_a_write_returned_is_not_replaced_by_an_older_one(server: KubernetesServer) -> None:
    observer = Observer(server)
    observer.put("a")

    async def scenario(informer: Informer[Kept]) -> None:
        newer = {"metadata": {"name": "a", "namespace": "team", "uid": "a-uid", "resourceVersion": "999999"}}
        informer.note({**newer, "phase": "Written"})
        observer.put("a", "Older")
        observer.put("b")
        await observer.until(a="Written", b="")

    observer.play(scenario)


def test_an_object_that_was_deleted_while_a_write_was_under_way_stays_gone(server: KubernetesServer) -> None:
    observer = Observer(server)
    observer.put("a")

    async def scenario(informer: Informer[Kept]) -> None:
        returned = server.get("pods", "a", "team")
        server.delete("pods", "a", "team")
        await observer.until()
        informer.note(returned)
        assert len(informer) == 0

    observer.play(scenario)
    assert observer.known == {}


def test_an_object_that_is_no_longer_of_use_counts_as_gone(server: KubernetesServer) -> None:
    observer = Observer(server)
    observer.put("a")

    async def scenario(informer: Informer[Kept]) -> None:
        gone = {"metadata": {"name": "other", "namespace": "team", "uid": "a-uid", "resourceVersion": "999999"}}
        informer.note(gone)
        await observer.until()

    observer.play(scenario)


def test_an_object_that_cannot_be_read_does_not_end_it(
    server: KubernetesServer, caplog: pytest.LogCaptureFixture
) -> None:
    observer = Observer(server)
    observer.put("a")
    observer.put("broken")

    async def scenario(_: Informer[Kept]) -> None:
        observer.put("broken", "Running")
        observer.put("b")
        await observer.until(a="", b="")

    observer.play(scenario)
    assert "a number that nobody thought of" in caplog.text


def test_a_watch_that_fails_at_once_does_not_list_all_objects_again_and_again(
    server: KubernetesServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(informer_module, "FIRST_RETRY_S", 0.02)
    observer = Observer(server)

    async def scenario(_: Informer[Kept]) -> None:
        server.oldest = 10**6
        server.end_watches()
        before, began = len(server.requests), time.monotonic()
        await observer.until_requests(before + 12)  # each attempt is a list and a watch
        assert time.monotonic() - began >= 0.02 * (1 + 2 + 4 + 8), "it waits twice as long before each"
        server.oldest = 0
        observer.put("a")
        await observer.until(a="")

    observer.play(scenario)
    assert len([each for each in caplog.records if each.levelname == "WARNING"]) == 1


def test_a_refusal_is_logged_once_and_repeated_seldom(
    server: KubernetesServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(informer_module, "MAX_RETRY_S", 0.4)
    observer = Observer(server)

    async def scenario(_: Informer[Kept]) -> None:
        server.forbidden.add("pods")
        server.end_watches()
        before, began = len(server.requests), time.monotonic()
        await observer.until_requests(before + 4)
        assert time.monotonic() - began >= 2 * 0.4
        server.forbidden.clear()
        observer.put("a")
        await observer.until(a="")

    observer.play(scenario)
    refusals = [each.message for each in caplog.records if each.message.startswith("cannot list pods")]
    assert len(refusals) == 1, refusals
    assert "pods is forbidden" in refusals[0]
