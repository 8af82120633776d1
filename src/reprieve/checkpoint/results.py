"""What a Checkpointer answers with: a save that was asked for, and where a run goes on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from reprieve.checkpoint.restore.resume import PassedOver
from reprieve.checkpoint.save.replica_check import Divergence


@dataclass(slots=True)
class Save:
    """A save that was asked for."""

    step: int
    path: Path
    bytes: int = 0
    blocked: timedelta = timedelta(0)
    """How long training stood still."""
    skipped: str | None = None
    """Why nothing was written, if nothing was."""
    diverged: list[Divergence] = field(default_factory=list)
    """Tensors that should be the same on all ranks and are not."""
    _done: Future[None] | None = field(default=None, repr=False)

    @property
    def done(self) -> bool:
        return self._done is None or self._done.done()

    def when_durable(self, call: Callable[[], object]) -> None:
        """Now, or on the saving thread as soon as it is; never, if it fails."""
        if self._done is None:
            call()
        else:
            self._done.add_done_callback(lambda done: call() if done.exception() is None else None)

    def wait(self) -> Path:
        """The checkpoint, once it is durable; raises what went wrong."""
        if self._done is not None:
            self._done.result()
        return self.path


@dataclass(frozen=True, slots=True)
class Restored:
    """Where the run goes on."""

    step: int
    epoch: float | None
    path: Path
    values: Mapping[str, Any]
    metrics: Mapping[str, float]
    passed_over: list[PassedOver]
    """Newer checkpoints that could not be used, and why."""
    finished: Any = None
    """What `finish` was told with this step: then there is nothing left to do."""
