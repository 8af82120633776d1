"""Informer: keeps what is used of all objects of one kind, as they are now.

list ─► watch ─► … the watch ends, fails, or its version is too old (410) ─► list again, and compare

What vanished while nobody watched is found by the comparison. lightkube retries no connection that is refused, so this
does.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from reprieve.errors import KubernetesError
from reprieve.kubernetes.api import ALL_NAMESPACES, KubernetesApi, Labels
from reprieve.kubernetes.kinds import Kind, Object
from reprieve.operator.log import fields
from reprieve.operator.metrics.counters import Counters

log = logging.getLogger(__name__)

FIRST_RETRY_S = 0.2
MAX_RETRY_S = 5.0
LASTS_S = 5.0
"""A watch that has lasted as long works."""


class Kept(Protocol):
    """What is kept of an object."""

    @property
    def uid(self) -> str: ...

    @property
    def version(self) -> int: ...


K = TypeVar("K", bound=Kept)


class Informer(Generic[K]):
    """Calls `on_change(kept)` for each object that is new or has changed, and `on_delete(kept)` for each that is gone.

    reduce: what to keep of an object; None: nothing, as if it did not exist.
    """

    def __init__(
        self,
        api: KubernetesApi,
        kind: Kind,
        reduce: Callable[[Object], K | None],
        *,
        on_change: Callable[[K], None],
        on_delete: Callable[[K], None],
        counters: Counters,
        labels: Labels | None = None,
    ) -> None:
        self._api = api
        self._kind = kind
        self._reduce = reduce
        self._on_change = on_change
        self._on_delete = on_delete
        self._counters = counters
        self._labels = labels
        self._kept: dict[str, K] = {}
        self._warned = ""
        self.has_synced = asyncio.Event()
        """The first list is complete."""
        counters.declare("watch_restarts", kind=kind.name)

    def __len__(self) -> int:
        return len(self._kept)

    async def run(self) -> None:
        """List and watch for ever."""
        retry_s = FIRST_RETRY_S
        while True:
            began = None
            try:
                version = await self._list()
                began = time.monotonic()
                await self._watch(version)
            except KubernetesError as error:
                self._warn(str(error))
            # Not after a list: where each watch fails at once, all objects would be listed again and again.
            if began is not None and time.monotonic() - began >= LASTS_S:
                retry_s, self._warned = FIRST_RETRY_S, ""
            await asyncio.sleep(retry_s)
            retry_s = min(2 * retry_s, MAX_RETRY_S)

    def note(self, found: Object) -> None:
        """Take in a known object that a request has returned. The watch may be behind it, or ahead: an object that was
        deleted meanwhile stays gone."""
        if (uid := self._uid(found)) in self._kept:
            self._take(uid, self._reduced(found))

    async def _list(self) -> str:
        found, version = await self._api.list_reduced(
            self._kind,
            lambda each: (self._uid(each), self._reduced(each)),
            labels=self._labels,
            namespace=ALL_NAMESPACES,
        )
        if self.has_synced.is_set():
            self._counters.add("watch_restarts", kind=self._kind.name)
        present = {uid for uid, _ in found}
        for uid in [uid for uid in self._kept if uid not in present]:
            self._remove(uid)
        for uid, kept in found:
            self._take(uid, kept)
        self.has_synced.set()
        return version

    async def _watch(self, version: str) -> None:
        events = self._api.watch(self._kind, resource_version=version, labels=self._labels, namespace=ALL_NAMESPACES)
        async for event in events:
            uid = self._uid(event.object)
            if event.type == "DELETED":
                self._take(uid, self._reduced(event.object))  # its last state: how a pod has ended
                self._remove(uid)
            elif event.type in ("ADDED", "MODIFIED"):
                self._take(uid, self._reduced(event.object))

    def _reduced(self, found: Object) -> K | None:
        try:
            return self._reduce(found)
        except Exception:  # anybody can write objects, and one that nobody thought of must not end all others
            metadata = found["metadata"]
            where = fields(kind=self._kind.name, namespace=metadata.get("namespace"), name=metadata.get("name"))
            log.exception("an object that cannot be read is ignored", extra=where)
            return None

    def _take(self, uid: str, kept: K | None) -> None:
        known = self._kept.get(uid)
        if kept is None:
            self._remove(uid)
        elif known is None or kept.version > known.version:
            self._kept[uid] = kept
            self._on_change(kept)

    def _remove(self, uid: str) -> None:
        if (known := self._kept.pop(uid, None)) is not None:
            self._on_delete(known)

    @staticmethod
    def _uid(found: Object) -> str:
        return str(found["metadata"]["uid"])

    def _warn(self, message: str) -> None:
        """Log a message, but not the same one at each attempt."""
        if message != self._warned:
            log.warning("%s; trying again", message, extra=fields(kind=self._kind.name))
        self._warned = message
