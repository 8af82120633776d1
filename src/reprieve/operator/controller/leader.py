"""LeaderElection: of all replicas, one runs a task, by a Lease that it renews.

follower ─► the Lease is free, or was not renewed for as long as it says ─► leader ─► renews it every RENEW_S
leader ─► could not renew it for GIVE_UP ─► its task is cancelled ─► follower        stop ─► gives the Lease back

Whether a Lease is renewed, a follower judges by its own clock: it counts from when it saw the record change. A leader
gives up before any follower may take over, whatever their clocks say.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from datetime import datetime, timezone

from reprieve.errors import KubernetesError, ObjectChanged, ObjectNotFound
from reprieve.kubernetes.api import KubernetesApi, within
from reprieve.kubernetes.kinds import LEASE, Object
from reprieve.operator.log import fields

log = logging.getLogger(__name__)

LEASE_S = 12
RENEW_S = 3.0
GIVE_UP_S = 8.0
"""After the start of the last request that renewed the Lease. The difference is for a task that is slow to end."""
REQUEST_S = 4.0
RELEASE_S = 2.0


class LeaderElection:
    """Takes part in an election. `identity`: of this replica, and of no other."""

    def __init__(self, api: KubernetesApi, *, name: str, namespace: str, identity: str) -> None:
        self._api = api
        self._name = name
        self._namespace = namespace
        self._identity = identity
        self._seen: tuple[str, float] = ("", 0.0)
        """The version of another's record, and when it was seen first."""
        self._renewed = 0.0
        self._warned = ""
        self.is_leader = False

    async def run(self, lead: Callable[[], Awaitable[None]]) -> None:
        """Take part for ever; `lead` runs while this replica is the leader. If it ends by itself, so does this."""
        try:
            while True:
                while not await self._try(REQUEST_S):
                    await asyncio.sleep(RENEW_S)
                await self._lead(lead)
        finally:
            if self.is_leader:
                await self._release()

    async def _lead(self, lead: Callable[[], Awaitable[None]]) -> None:
        log.info("leads", extra=fields(lease=self._name))
        self.is_leader = True
        task = asyncio.ensure_future(lead())
        try:
            while self._left_s > 0:
                await asyncio.wait([task], timeout=min(RENEW_S, self._left_s))
                if task.done():
                    task.result()
                    raise RuntimeError("the leader's task has ended")
                if not await self._try(min(REQUEST_S, self._left_s)) and self._is_taken:
                    break
            self.is_leader = False
            log.warning("no longer leads: the lease could not be renewed", extra=fields(lease=self._name))
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    @property
    def _left_s(self) -> float:
        """Until this replica gives up."""
        return max(0.0, self._renewed + GIVE_UP_S - time.monotonic())

    @property
    def _is_taken(self) -> bool:
        return bool(self._seen[0])

    async def _try(self, seconds: float) -> bool:
        """Take or renew the Lease within so many seconds. Return whether this replica has it now."""
        began = time.monotonic()
        try:
            has_it = await within(seconds, self._take())
            self._warned = ""
        except ObjectChanged:  # another replica was first
            return False
        except (KubernetesError, asyncio.TimeoutError) as error:
            self._warn(str(error) or "no answer in time")
            return False
        if has_it:
            self._renewed, self._seen = began, ("", 0.0)
        return has_it

    async def _take(self) -> bool:
        try:
            lease = await self._api.get(LEASE, self._name, namespace=self._namespace)
        except ObjectNotFound:
            await self._api.create(LEASE, self._record({}, self._identity), namespace=self._namespace)
            return True
        if not self._may_take(lease):
            return False
        await self._api.replace(LEASE, self._record(lease, self._identity), namespace=self._namespace)
        return True

    def _may_take(self, lease: Object) -> bool:
        spec = lease.get("spec") or {}
        if spec.get("holderIdentity") in (None, "", self._identity):
            return True
        version, now = str(lease["metadata"]["resourceVersion"]), time.monotonic()
        if version != self._seen[0]:
            self._seen = (version, now)
        return now - self._seen[1] > float(spec.get("leaseDurationSeconds") or LEASE_S)

    async def _release(self) -> None:
        """Let a follower take over at once."""
        with contextlib.suppress(KubernetesError, asyncio.TimeoutError):
            await within(RELEASE_S, self._give_back())
        self.is_leader = False

    async def _give_back(self) -> None:
        lease = await self._api.get(LEASE, self._name, namespace=self._namespace)
        if (lease.get("spec") or {}).get("holderIdentity") == self._identity:
            await self._api.replace(LEASE, self._record(lease, ""), namespace=self._namespace)

    def _record(self, lease: Object, holder: str) -> Object:
        spec, now = lease.get("spec") or {}, datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        is_new = spec.get("holderIdentity") != holder
        return {
            **lease,
            "metadata": lease.get("metadata") or {"name": self._name, "namespace": self._namespace},
            "spec": {
                **spec,
                "holderIdentity": holder,
                "leaseDurationSeconds": LEASE_S,
                "acquireTime": now if is_new else spec.get("acquireTime"),
                "renewTime": now,
                "leaseTransitions": int(spec.get("leaseTransitions") or 0) + int(is_new and bool(spec)),
            },
        }

    def _warn(self, message: str) -> None:
        """Log a message, but not the same one at each attempt."""
        if message != self._warned:
            log.warning("lease: %s; trying again", message, extra=fields(lease=self._name))
        self._warned = message
