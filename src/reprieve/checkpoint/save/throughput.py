"""How far the running save is, and how fast saves are: what a deadline is held against."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from reprieve.clock import Clock


@dataclass(slots=True)
class SaveInProgress:
    """A save that is being written, as this rank sees it."""

    step: int
    bytes: int
    share: int
    """What this rank writes of them, nearly."""
    began: float
    clock: Clock
    moved: int = 0

    def seconds_left(self) -> float | None:
        """At the speed so far; None as long as nothing was written."""
        if not self.moved:
            return None
        return (self.clock.monotonic() - self.began) * max(0, self.share - self.moved) / self.moved


class SaveThroughput:
    """Of the saves of one process, one at a time. Entered while one is written."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._next: SaveInProgress | None = None
        self.running: SaveInProgress | None = None
        self._seconds_per_byte: float | None = None
        self._abort = False

    def begin(self, step: int, size: int, world_size: int) -> None:
        self._abort = False
        self._next = SaveInProgress(step, size, size // world_size, 0.0, self._clock)

    def __enter__(self) -> None:
        self.running = self._next
        if self.running is not None:
            self.running.began = self._clock.monotonic()

    def __exit__(self, error: object, *exc: object) -> None:
        done, self.running = self.running, None
        if done is not None and error is None and done.bytes:
            self._seconds_per_byte = (self._clock.monotonic() - done.began) / done.bytes

    def seconds_for(self, size: int) -> float | None:
        """By the last one; None before it."""
        return None if self._seconds_per_byte is None else size * self._seconds_per_byte

    def abort(self) -> None:
        """Have the running one fail. From any thread."""
        self._abort = True

    def counting(self, progress: Callable[[int], None] | None) -> Callable[[int], None]:
        """What the writer reports its bytes to."""

        def moved(count: int) -> None:
            if self._abort:
                raise SaveAborted
            if (running := self.running) is not None:
                running.moved += count
            if progress is not None:
                progress(count)

        return moved


class SaveAborted(Exception):
    """Somebody needs the time for another save."""
