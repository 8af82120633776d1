"""Reports a run on Ray to `reprieve run`, from the driver: the launcher sees one rank, which lives through restarts.

Only the driver reports. A preempted worker is restarted by Ray, and must not make the launcher stop the job.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable

from reprieve import launcher_protocol
from reprieve.adapters.ray.progress import PROGRESS
from reprieve.errors import ReprieveError
from reprieve.launcher_protocol import Reporter
from reprieve.progress.snapshot import Progress
from reprieve.ranks.store import Store

_POLL_S = 0.5


class LauncherReports:
    """The reports of one `fit()`."""

    def __init__(self, folder: str, connect: Callable[[], Store | None]) -> None:
        """`folder`: Ray's folder of the run. `connect`: returns the store of the run, once there is one."""
        self._reporter = Reporter(0, 1)
        self._folder = folder
        self._connect = connect
        self._last: Progress | None = None
        self._started = False
        self._stop_at: float | None = None
        self._ended = threading.Event()
        if self._reporter.has_launcher:
            self._reporter.send(launcher_protocol.Starting(checkpoints=folder))
            threading.Thread(target=self._follow, name="reprieve launcher reports", daemon=True).start()

    def stopping(self, reason: str) -> None:
        self._stop_at = time.monotonic()
        self._reporter.send(launcher_protocol.Stopping(reason=reason, step=self._step))

    def stopped(self, saved_step: int | None, *, starts_over: bool) -> None:
        """`saved_step`: the last step, if it is saved. `starts_over`: the next driver uses another folder."""
        self._ended.set()
        now = time.monotonic()
        times = {"signal": self._stop_at or now, "agreed": now, "durable": now, "left": now}
        step = self._step if saved_step is None else saved_step
        saved = saved_step is not None
        self._reporter.send(launcher_protocol.Stopped(step=step, saved=saved, starts_over=starts_over, times=times))

    def finished(self) -> None:
        self._ended.set()
        self._reporter.send(launcher_protocol.Finished(step=self._step))

    def close(self) -> None:
        self._ended.set()

    @property
    def _step(self) -> int:
        return self._last.step if self._last is not None else 0

    def _follow(self) -> None:
        """Send what the controller publishes. On a thread of its own."""
        store: Store | None = None
        with contextlib.suppress(ReprieveError):
            while not self._ended.wait(_POLL_S):
                store = store or self._connect()
                data = store.get(PROGRESS) if store is not None else None
                if data is not None:
                    self._send(Progress.from_json(data))

    def _send(self, progress: Progress) -> None:
        before, self._last = self._last, progress
        if not self._started and progress.step:
            self._started = True
            started = launcher_protocol.Started(checkpoints=self._folder, resumed=progress.resumed_from)
            self._reporter.send(started)
        if self._started:
            done = None if progress.percent is None else progress.percent / 100
            self._reporter.send(launcher_protocol.Step(step=progress.step, done=done, eta_s=progress.eta_s), wait=False)
        latest = progress.checkpoints
        if latest.latest is not None and (before is None or before.checkpoints.latest != latest.latest):
            took = latest.last_save_s or 0.0
            saved = launcher_protocol.Saved(
                step=next((each.step for each in latest.listed if each.path == latest.latest), progress.step),
                path=latest.latest,
                bytes=latest.latest_bytes or 0,
                began=time.monotonic() - took,
                took=took,
            )
            self._reporter.send(saved)
