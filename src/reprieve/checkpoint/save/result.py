"""The result of a requested save, as the training script sees it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

from reprieve.checkpoint.save.replica_check import Divergence


@dataclass(slots=True)
class Save:
    """A save that was requested: durable, being written in the background, or skipped."""

    step: int
    path: Path
    bytes: int = 0
    blocked: timedelta = timedelta(0)
    """How long the save blocked training."""
    skipped: str | None = None
    """Why nothing was written, if nothing was."""
    diverged: list[Divergence] = field(default_factory=list)
    """Tensors that should be the same on all ranks and are not."""
    pending: Future[None] | None = field(default=None, repr=False)
    """The background job that writes it; None: there is nothing to wait for."""

    @property
    def done(self) -> bool:
        """Whether the save has ended, well or not."""
        return self.pending is None or self.pending.done()

    def when_durable(self, call: Callable[[], object]) -> None:
        """Call this now if the save is durable, or on the saving thread as soon as it is. Never if the save fails."""
        if self.pending is None:
            call()
        else:
            self.pending.add_done_callback(lambda done: call() if done.exception() is None else None)

    def wait(self) -> Path:
        """Wait until the checkpoint is durable and return its path; raises the error of a save that failed."""
        if self.pending is not None:
            self.pending.result()
        return self.path
