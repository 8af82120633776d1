"""A thread that polls a cloud for notices that it will reclaim this machine.

It sits between a `Cloud`, which knows the requests, and the stop listener, which gets each notice once. Whatever the
cloud's metadata server does (errors, nonsense, silence), the thread keeps polling, and training is not affected.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Protocol

from reprieve.console import ONE_RANK

log = logging.getLogger("reprieve")

_LONGEST_PAUSE = timedelta(seconds=15)
"""After errors. Half of the shortest notice that a cloud gives (30 s, Google Cloud and Azure)."""


@dataclass(frozen=True, slots=True)
class Notice:
    """A cloud's announcement about this machine."""

    source: str
    """The sender: "AWS spot"."""
    reason: str
    """What will happen, as text for log lines."""
    deadline: datetime | None = None
    """When the machine is reclaimed, in UTC; None: unknown."""
    urgent: bool = True
    """False: worth logging, but no reason to stop now."""
    event: str = ""
    """The cloud's name for what will happen. An event is passed on once, and again when it becomes urgent."""


class Cloud(Protocol):
    """A source of notices."""

    @property
    def name(self) -> str:
        """The name in log lines: "AWS"."""

    @property
    def pause(self) -> timedelta:
        """The time between two polls."""

    def poll(self) -> Notice | None:
        """Ask once and return the current notice. May wait for a change, within limits; raises any error."""


class NoticePoller:
    """A poller of one cloud, from `start` to `close`."""

    def __init__(
        self, cloud: Cloud, on_notice: Callable[[Notice], object], *, longest_pause: timedelta = _LONGEST_PAUSE
    ) -> None:
        """`on_notice`: called on the polling thread. `longest_pause`: the most between two polls, however long the
        server has been failing."""
        self._cloud = cloud
        self._on_notice = on_notice
        self._longest_pause = longest_pause
        self._closed = threading.Event()
        self._passed_on: set[tuple[str, str, bool]] = set()
        self._problem: str | None = None
        self._thread = threading.Thread(target=self._poll, name=f"reprieve notices {cloud.name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Stop polling. Returns at once: a request that hangs ends by its own timeout and is ignored."""
        self._closed.set()

    def _poll(self) -> None:
        log.debug("polling %s for notices every %g s", self._cloud.name, self._cloud.pause.total_seconds())
        pause = self._cloud.pause
        while not self._closed.is_set():
            try:
                notice = self._cloud.poll()
            except Exception as error:  # noqa: BLE001 - keep polling whatever a server answers
                self._failed(error)
                pause = min(2 * pause, self._longest_pause)
            else:
                self._worked()
                pause = self._cloud.pause
                if notice is not None:
                    self._pass_on(notice)
            self._closed.wait(pause.total_seconds())

    def _failed(self, error: Exception) -> None:
        problem = str(error) or type(error).__name__
        if problem != self._problem and not self._closed.is_set():
            log.warning(
                "cannot poll %s for notices: %s. Training continues, and polling does, too",
                self._cloud.name,
                problem,
                extra=ONE_RANK,
            )
        self._problem = problem

    def _worked(self) -> None:
        if self._problem is not None:
            log.info("%s answers again: notices are received", self._cloud.name)
        self._problem = None

    def _pass_on(self, notice: Notice) -> None:
        key = (notice.source, notice.event, notice.urgent)
        if key in self._passed_on or self._closed.is_set():
            return
        self._passed_on.add(key)
        try:
            self._on_notice(notice)
        except Exception:
            log.exception("a notice of %s could not be passed on: %s", notice.source, notice.reason)
