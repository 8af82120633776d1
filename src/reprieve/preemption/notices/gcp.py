"""Google Cloud: the preemption of a Spot VM, and host maintenance that ends one, from the VM's metadata server.

A `NoticePoller` polls it. The server holds a request until the value changes, so a notice arrives at once.
https://cloud.google.com/compute/docs/metadata/querying-metadata
https://cloud.google.com/compute/docs/gpus/gpu-host-maintenance
"""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from urllib.parse import urlencode

from reprieve.clock import Clock, SystemClock
from reprieve.preemption.notices.metadata_server import Answer, MetadataError, MetadataServer
from reprieve.preemption.notices.poller import Notice

_URL = "http://metadata.google.internal"
_PAUSE = timedelta(seconds=1)
"""For a server that does not hold requests. With one that does, nothing is missed meanwhile: see `last_etag`."""
_WAIT = timedelta(seconds=10)
"""How long the server may hold a request."""
_LIMIT = timedelta(seconds=5)
_GRACE = timedelta(seconds=30)
"""From the notice until the machine is switched off."""


class Gcp:
    """The metadata server of a Compute Engine VM."""

    name = "Google Cloud"

    def __init__(
        self,
        url: str = _URL,
        *,
        pause: timedelta = _PAUSE,
        wait: timedelta = _WAIT,
        limit: timedelta = _LIMIT,
        clock: Clock | None = None,
    ) -> None:
        self.pause = pause
        self._server = MetadataServer(url, limit=limit, headers={"Metadata-Flavor": "Google"})
        self._wait = wait
        self._limit = limit
        self._clock = clock or SystemClock()
        self._etag: str | None = None

    def poll(self) -> Notice | None:
        return self._preemption() or self._maintenance()

    def _preemption(self) -> Notice | None:
        etag, self._etag = self._etag, None
        if etag is None:
            # Without waiting: if the value is TRUE already, there is no change to wait for.
            answer = self._get("preempted")
        else:
            # The server waits only while the value is the one with this etag.
            query = {"wait_for_change": "true", "timeout_sec": f"{self._wait.total_seconds():g}", "last_etag": etag}
            answer = self._get(f"preempted?{urlencode(query)}", limit=self._wait + self._limit)
        value = answer.text.strip()
        if value not in ("TRUE", "FALSE"):
            raise MetadataError("instance/preempted: neither TRUE nor FALSE")
        self._etag = answer.headers.get("ETag")
        if value == "FALSE":
            return None
        deadline = datetime.fromtimestamp(self._clock.time(), timezone.utc) + _GRACE
        reason = f"the machine is preempted: it is switched off {_GRACE.total_seconds():g} s after this notice"
        return Notice("Google Cloud spot", reason, deadline, event="preempted")

    def _maintenance(self) -> Notice | None:
        """Announced an hour ahead to machines with a GPU and a minute ahead to others, and the notice does not tell
        which. So it only logs a warning; at the shutdown of the machine its processes get SIGTERM."""
        if self._get("maintenance-event").text.strip() != "TERMINATE_ON_HOST_MAINTENANCE":
            return None
        reason = "the machine will be stopped for host maintenance (within an hour if it has a GPU, else in a minute)"
        return Notice("Google Cloud maintenance", reason, urgent=False, event="maintenance")

    def _get(self, key: str, limit: timedelta | None = None) -> Answer:
        answer = self._server.request(f"/computeMetadata/v1/instance/{key}", limit=limit)
        if answer.headers.get("Metadata-Flavor") != "Google":
            raise MetadataError("the answer is not from Google's metadata server: no Metadata-Flavor")
        return answer
