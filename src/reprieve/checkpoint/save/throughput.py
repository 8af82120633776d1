"""The progress of the running save and the speed of past ones, to tell whether a save fits before a deadline."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from reprieve.clock import Clock


@dataclass(slots=True)
class SaveInProgress:
    """A save that is being written, as seen by this rank."""

    step: int
    bytes: int
    share: int
    """The bytes that this rank writes, about."""
    started_at: float
    clock: Clock
    written_bytes: int = 0

    def remaining_s(self) -> float | None:
        """The time until it is written, at the speed so far; None before the first byte."""
        if not self.written_bytes:
            return None
        return (self.clock.monotonic() - self.started_at) * max(0, self.share - self.written_bytes) / self.written_bytes


class SaveThroughput:
    """The speed of the saves of one process, which run one at a time. Entered while one is written."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._next: SaveInProgress | None = None
        self.running: SaveInProgress | None = None
        self._seconds_per_byte: float | None = None
        self._abort = False

    def begin(self, step: int, size: int, world_size: int) -> None:
        """Note the size of the save that is written next."""
        self._abort = False
        self._next = SaveInProgress(step, size, size // world_size, 0.0, self._clock)

    def __enter__(self) -> None:
        self.running = self._next
        if self.running is not None:
            self.running.started_at = self._clock.monotonic()

    def __exit__(self, error: object, *exc: object) -> None:
        ended, self.running = self.running, None
        if ended is not None and error is None and ended.bytes:
            self._seconds_per_byte = (self._clock.monotonic() - ended.started_at) / ended.bytes

    def seconds_for(self, size: int) -> float | None:
        """The time that a save of this size takes at the speed of the last one; None before the first."""
        return None if self._seconds_per_byte is None else size * self._seconds_per_byte

    def abort(self) -> None:
        """Make the running save fail. From any thread."""
        self._abort = True

    def counting(self, progress: Callable[[int], None] | None) -> Callable[[int], None]:
        """The callback that counts the bytes of the writer and passes them on to `progress`."""

        def count_bytes(count: int) -> None:
            if self._abort:
                raise SaveAborted
            if (running := self.running) is not None:
                running.written_bytes += count
            if progress is not None:
                progress(count)

        return count_bytes


class SaveAborted(Exception):
    """The save was aborted, because another one needs the time."""
