"""Azure: evictions of Spot VMs, deletions, reboots and moves, from the Scheduled Events of the metadata service.

A `NoticePoller` polls it. One document lists the events of a whole scale set or availability set; only those that name
this machine count. Reprieve approves none: that would start them early for all machines that they name.
https://learn.microsoft.com/azure/virtual-machines/linux/scheduled-events
"""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from email.utils import parsedate_to_datetime
from typing import Any

from reprieve.clock import Clock, SystemClock
from reprieve.preemption.notices.metadata_server import MetadataError, MetadataServer
from reprieve.preemption.notices.poller import Notice

_URL = "http://169.254.169.254"
_PAUSE = timedelta(seconds=2)
"""Azure recommends one second. Two are enough for the 30 s of notice that a Spot VM gets."""
_FIRST_LIMIT = timedelta(seconds=130)
"""The first request enables Scheduled Events, which takes "up to two minutes"."""
_LIMIT = timedelta(seconds=5)
_LEAD = timedelta(minutes=5)
"""Moves off failing hardware are announced days ahead: stop only in the last minutes."""

_REMOVALS = {"Preempt": "is evicted", "Terminate": "is deleted"}
_RESTARTS = {"Reboot": "is rebooted", "Redeploy": "is moved to another host"}


class Azure:
    """The metadata service of an Azure VM."""

    name = "Azure"

    def __init__(
        self,
        url: str = _URL,
        *,
        pause: timedelta = _PAUSE,
        limit: timedelta = _LIMIT,
        first_limit: timedelta = _FIRST_LIMIT,
        lead: timedelta = _LEAD,
        clock: Clock | None = None,
    ) -> None:
        """`lead`: how long before an event it becomes urgent."""
        self.pause = pause
        self._server = MetadataServer(url, limit=limit, headers={"Metadata": "true"})
        self._limit: timedelta | None = first_limit
        self._lead = lead
        self._clock = clock or SystemClock()

    def poll(self) -> Notice | None:
        answer = self._server.request("/metadata/scheduledevents?api-version=2020-07-01", limit=self._limit)
        self._limit = None
        events = answer.json().get("Events")
        if not isinstance(events, list):
            raise MetadataError("scheduledevents: no list of events")
        if not events:
            return None
        # Not cached: one wrong answer would make us miss every later event.
        answer = self._server.request("/metadata/instance/compute/name?api-version=2021-02-01&format=text")
        machine = answer.text.strip().casefold()
        now = datetime.fromtimestamp(self._clock.time(), timezone.utc)
        notices = [notice for event in events if (notice := self._notice(event, machine, now)) is not None]
        return min(notices, key=lambda notice: (not notice.urgent, notice.deadline or now), default=None)

    def _notice(self, event: Any, machine: str, now: datetime) -> Notice | None:
        resources = event.get("Resources") if isinstance(event, dict) else None
        if not isinstance(resources, list) or machine not in (str(name).casefold() for name in resources):
            return None
        kind, not_before = event.get("EventType"), event.get("NotBefore")
        what = _REMOVALS.get(str(kind))
        if what is None and event.get("EventStatus") != "Started":
            # A started event is too late to act on. It also stays listed for minutes after the machine is back, and
            # would stop the run that has just resumed.
            what = _RESTARTS.get(str(kind))
        if what is None:
            return None
        deadline = _utc(not_before) if not_before else now
        when = f"not before {deadline:%Y-%m-%d %H:%M:%S} UTC" if deadline and not_before else "now"
        urgent = deadline is None or deadline - now <= self._lead
        reason = f"the machine {what}, {when} ({kind})"
        return Notice("Azure", reason, deadline, urgent, event=str(event.get("EventId")))


def _utc(text: object) -> datetime | None:
    """`Mon, 19 Sep 2016 18:29:47 GMT`. An event at an unreadable time is still one."""
    try:
        time = parsedate_to_datetime(str(text))
    except (ValueError, TypeError):
        return None
    return time.astimezone(timezone.utc) if time.tzinfo else time.replace(tzinfo=timezone.utc)
