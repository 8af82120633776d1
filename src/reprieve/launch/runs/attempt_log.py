"""Keeps the record of attempts in the checkpoint folder up to date (checkpoint/folder/attempts.py).

The launcher must answer signals while storage hangs, so a thread of its own reads and writes. Nothing waits for it
longer than `_TIMEOUT_S`. If the record cannot be written, the run continues without it, and that is logged once.
"""

from __future__ import annotations

import copy
import logging
import queue
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout  # its own class before Python 3.11
from pathlib import Path

from reprieve.checkpoint.folder import attempts as attempts_file
from reprieve.checkpoint.folder.attempts import AttemptRecord
from reprieve.run_state import RunState
from reprieve.storage.disk import Disk

log = logging.getLogger("reprieve")

_TIMEOUT_S = 2.0
_WRITE_INTERVAL_S = 15.0
"""How often to write while nothing changes but the step: the folder may be on a network file system."""


class AttemptLog:
    """The record of attempts in one checkpoint folder, as one launcher uses it."""

    def __init__(self, root: Path, node: int, launcher: str, *, starts_over: bool = False) -> None:
        """`launcher`: its socket, which marks the attempts of this launcher. `starts_over`: drop all others."""
        self.root = root
        self._starts_over = starts_over
        self._node = node
        self._launcher = launcher
        self._disk = Disk()
        self._written: tuple[object, ...] = ()
        self._written_at = 0.0
        self._has_failed = False
        self._queue: queue.SimpleQueue[list[AttemptRecord] | Future[list[AttemptRecord]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="reprieve attempt log", daemon=True)
        self._thread.start()

    def earlier(self) -> list[AttemptRecord]:
        """Read the attempts of other launchers; none if storage does not answer in time.

        One without an end counts as lost. Its launcher may still record the end, until the ranks of this one hold the
        folder.
        """
        if self._starts_over:
            return []
        found: Future[list[AttemptRecord]] = Future()
        self._queue.put(found)
        try:
            return found.result(_TIMEOUT_S)
        except FutureTimeout:
            log.warning("%s does not respond: attempts of this run before this start are not known", self.root)
            return []

    def update(self, attempts: Sequence[AttemptRecord]) -> None:
        """Write the attempts, if something changed that others must know, or after a while."""
        last, now = attempts[-1], time.monotonic()
        state = (len(attempts), last.training, last.kept_until, last.cause)
        if state == self._written and now - self._written_at < _WRITE_INTERVAL_S:
            return
        self._written, self._written_at = state, now
        last.updated = time.time()
        self._queue.put(copy.deepcopy(list(attempts)))

    def close(self) -> None:
        """Wait until everything is written, if storage responds."""
        self._queue.put(None)
        self._thread.join(_TIMEOUT_S)

    def _serve(self) -> None:
        while (task := self._queue.get()) is not None:
            if isinstance(task, Future):
                task.set_result([attempt for attempt in self._read() if attempt.launcher != self._launcher])
                continue
            try:
                if any(attempt.cause == RunState.LOST for attempt in task):
                    task = attempts_file.with_recorded_ends(task, self._read())
                attempts_file.write(self._disk, self.root, task, node=self._node)
            except FileNotFoundError:  # the first rank makes the folder
                self._written = ()
            except OSError as error:
                if not self._has_failed:
                    self._has_failed = True
                    log.warning("the record of attempts in %s cannot be written: %s", self.root, error.strerror)

    def _read(self) -> list[AttemptRecord]:
        return attempts_file.read(self.root, node=self._node, launcher=self._launcher)
