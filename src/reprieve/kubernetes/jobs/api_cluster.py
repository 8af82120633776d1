"""`Cluster` over `KubernetesApi`, for callers without an event loop: the command line."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping
from types import TracebackType
from typing import Any, TypeVar

from reprieve.kubernetes.api import KubernetesApi, within
from reprieve.kubernetes.jobs.cluster import MOST_BYTES
from reprieve.kubernetes.kinds import Event, Kind, Object
from reprieve.kubernetes.pausing import MergePatch

T = TypeVar("T")

POD_TIMEOUT_S = 5.0
"""For an answer of a pod. One that trains answers within milliseconds."""


class ApiCluster:
    """Runs each request in an event loop of its own. Not for several threads."""

    def __init__(self, *, context: str | None = None, namespace: str | None = None) -> None:
        self._loop = asyncio.new_event_loop()
        try:
            self._api = self._run(_connect(context, namespace))
        except BaseException:
            self._loop.close()
            raise

    def __enter__(self) -> ApiCluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._run(self._api.close())
        self._run(self._loop.shutdown_asyncgens())
        self._loop.close()

    @property
    def namespace(self) -> str:
        return self._api.namespace

    def get(self, kind: Kind, name: str) -> Object:
        return self._run(self._api.get(kind, name))

    def list(self, kind: Kind, *, labels: Mapping[str, str] | None = None) -> tuple[list[Object], str]:
        return self._run(self._api.list_objects(kind, labels=labels))

    def watch(
        self, kind: Kind, *, resource_version: str, labels: Mapping[str, str] | None = None, seconds: int
    ) -> Iterator[Event]:
        events = self._api.watch(kind, resource_version=resource_version, labels=labels, seconds=seconds)
        return self._iterate(events, seconds=seconds)

    def patch(self, patch: MergePatch) -> Object:
        return self._run(self._api.merge_patch(patch.kind, patch.name, patch.content))

    def read_log(self, pod: str, *, container: str, follow: bool = False, lines: int | None = None) -> Iterator[str]:
        return self._iterate(self._api.read_log(pod, container=container, follow=follow, lines=lines))

    def get_from_pod(self, pod: str, port: int, path: str) -> bytes:
        return self._run(self._api.get_from_pod(pod, port, path, most_bytes=MOST_BYTES, timeout_s=POD_TIMEOUT_S))

    def _run(self, request: Coroutine[Any, Any, T]) -> T:
        return self._loop.run_until_complete(request)

    def _iterate(self, items: AsyncIterator[T], *, seconds: float | None = None) -> Iterator[T]:
        """Yield items, for so many seconds at most: lightkube opens a watch again when the server ends it."""
        until = None if seconds is None else self._loop.time() + seconds

        async def following() -> list[T]:
            """The next item, or none: a coroutine must not raise StopAsyncIteration."""
            async for item in items:
                return [item]
            return []

        try:
            while True:
                wait_s = None if until is None else max(0.0, until - self._loop.time())
                found = self._run(within(wait_s, following()))
                if not found:
                    return
                yield found[0]
        except asyncio.TimeoutError:
            return
        finally:
            self._run(items.aclose())  # type: ignore[attr-defined]


async def _connect(context: str | None, namespace: str | None) -> KubernetesApi:
    return KubernetesApi(context=context, namespace=namespace, field_manager="reprieve.dev/cli")
