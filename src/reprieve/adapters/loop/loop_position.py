"""Where a plain loop is now: steps, epoch, and the position in each pass over data.

`Run` advances it; `LoopAdapter` reads it for reports and saves. The calls of `batches` within an epoch are identified
by their order: after a resume the first call continues the first pass of the interrupted epoch, and so on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from reprieve.adapters.loop.loop_state import LoopState, PassState
from reprieve.data.resumable_loader import Pass, ResumableLoader


class SuspendedPass:
    """The stand-in for a pass while a batch of it is lent (`reentry.py`)."""

    def mark(self) -> None:
        pass

    def state(self) -> dict[str, Any]:
        raise AssertionError("a save while a batch is lent")

    def close(self) -> None:
        pass


@dataclass(slots=True)
class DataPass:
    """One call of `batches`."""

    source: int
    """Index of its loader in `LoopPosition.sources`."""
    iterator: Pass | SuspendedPass | None = None
    """None: the pass is complete, or the loop has left it."""
    left_at: dict[str, Any] | None = None
    """The position at which the loop left the pass before its end."""
    batch: int = 0
    """Batches that were handed out."""
    completed: int = 0
    """Batches that belong to completed steps."""

    def state(self) -> PassState:
        """Return the position at the last completed step."""
        return PassState(self.completed, self.left_at if self.iterator is None else self.iterator.state())


@dataclass(slots=True)
class LoopPosition:
    """The position of this process in its training loop."""

    steps: int = 0
    epoch: int = 0
    finished: list[int | None] | None = None
    """The epochs and steps that were requested, once they are done."""
    passes: list[DataPass] = field(default_factory=list)
    """The passes of this epoch, in the order of the calls."""
    sources: list[ResumableLoader] = field(default_factory=list)
    """The loaders, in the order of first use."""
    _resumed_sources: Sequence[Mapping[str, Any]] = ()
    _loaders: list[Any] = field(default_factory=list)

    @property
    def open_passes(self) -> list[DataPass]:
        return [data_pass for data_pass in self.passes if data_pass.iterator is not None]

    def source_index(self, loader: Any) -> int:
        """Return the index of this loader's source, which is created at the first use."""
        for index, known_loader in enumerate(self._loaders):
            if known_loader is loader:
                return index
        self._loaders.append(loader)
        self.sources.append(ResumableLoader(loader))
        index = len(self.sources) - 1
        self.restore_source(index)
        return index

    def restore_source(self, index: int) -> None:
        """Put a source into the state that it had in the interrupted process."""
        if index < len(self._resumed_sources):
            self.sources[index].restore(self._resumed_sources[index])

    def begin_pass(self, source: int) -> DataPass:
        data_pass = DataPass(source)
        self.passes.append(data_pass)
        return data_pass

    def step_ended(self) -> bool:
        """Count a completed step. Returns whether a pass is open."""
        self.steps += 1
        has_open_pass = False
        for data_pass in self.passes:
            if data_pass.iterator is not None:
                data_pass.iterator.mark()
                data_pass.completed = data_pass.batch
                has_open_pass = True
        return has_open_pass

    def epochs_done(self) -> float | None:
        """Return the epochs with a fraction, or None in a pass over a loader without a length."""
        if not (open_passes := self.open_passes):
            return float(self.epoch)
        try:
            length = len(self._loaders[open_passes[0].source])
        except TypeError:  # the loader has no length
            return None
        return self.epoch + min(1.0, open_passes[0].batch / max(1, length))

    def next_epoch(self) -> None:
        self.epoch += 1
        self.passes = []

    def restore(self, state: LoopState) -> None:
        self.steps = state.steps
        self.epoch = state.epoch
        self.passes = []
        self._resumed_sources = state.sources
