"""A thread that asks a cloud, again and again, whether this machine is about to be taken away.

Between one `Cloud`, which knows how to ask, and the guard, which is told of each notice once. Whatever the cloud's
metadata server does (errors, nonsense, silence), the thread goes on asking, and training does not notice.
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
    """What a cloud said of this machine."""

    source: str
    """Who says so: "AWS spot"."""
    reason: str
    """What will happen, for people."""
    deadline: datetime | None = None
    """When the machine goes, in UTC; None: not said."""
    urgent: bool = True
    """False: worth knowing, but no reason to stop now."""
    event: str = ""
    """The cloud's name for what will happen. An event is told once, and once more when it becomes urgent."""


class Cloud(Protocol):
    """How one cloud is asked."""

    @property
    def name(self) -> str:
        """For people: "AWS"."""

    @property
    def pause(self) -> timedelta:
        """Between two questions."""

    def poll(self) -> Notice | None:
        """Asks once. May wait for a change, but not for ever; raises what went wrong."""


class NoticePoller:
    """Watches one cloud from `start` to `close`."""

    def __init__(
        self, cloud: Cloud, on_notice: Callable[[Notice], object], *, longest_pause: timedelta = _LONGEST_PAUSE
    ) -> None:
        """`on_notice`: called on the watching thread. `longest_pause`: between two questions, however long the server
        has been failing."""
        self._cloud = cloud
        self._on_notice = on_notice
        self._longest_pause = longest_pause
        self._closed = threading.Event()
        self._told: set[tuple[str, str, bool]] = set()
        self._trouble: str | None = None
        self._thread = threading.Thread(target=self._watch, name=f"reprieve notices {cloud.name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """No more questions. Returns at once: a request that hangs ends by its own limit, and nobody hears of it."""
        self._closed.set()

    def _watch(self) -> None:
        log.debug("asking %s for notices every %g s", self._cloud.name, self._cloud.pause.total_seconds())
        pause = self._cloud.pause
        while not self._closed.is_set():
            try:
                notice = self._cloud.poll()
            except Exception as error:  # noqa: BLE001 - whatever a server answers, we go on asking
                self._failed(error)
                pause = min(2 * pause, self._longest_pause)
            else:
                self._worked()
                pause = self._cloud.pause
                if notice is not None:
                    self._tell(notice)
            self._closed.wait(pause.total_seconds())

    def _failed(self, error: Exception) -> None:
        trouble = str(error) or type(error).__name__
        if trouble != self._trouble and not self._closed.is_set():
            log.warning(
                "cannot ask %s for notices: %s. Training goes on, and we keep asking",
                self._cloud.name,
                trouble,
                extra=ONE_RANK,
            )
        self._trouble = trouble

    def _worked(self) -> None:
        if self._trouble is not None:
            log.info("%s answers again: notices are heard", self._cloud.name)
        self._trouble = None

    def _tell(self, notice: Notice) -> None:
        known = (notice.source, notice.event, notice.urgent)
        if known in self._told or self._closed.is_set():
            return
        self._told.add(known)
        try:
            self._on_notice(notice)
        except Exception:
            log.exception("a notice of %s could not be passed on: %s", notice.source, notice.reason)
