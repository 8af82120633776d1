"""What the session needs from a training loop: the seam between `session/` and `adapters/`.

    boundary ─► adapter calls session.save() or session.stop() ─► session calls capture() ─► Checkpointer.save

The adapter knows where its loop is and what belongs in a checkpoint. The session decides when that is read, saves it
and ends the process. A new framework needs one class with these methods, and calls of the session's `boundaries`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from reprieve.checkpoint.format.layout import FileLayout
from reprieve.progress.eta import completed_fraction


class TrainingProgress(NamedTuple):
    """How far a training loop is."""

    step: int
    total_steps: int | None = None
    epoch: float | None = None
    total_epochs: float | None = None
    samples: int | None = None
    """Samples that all ranks have trained on up to this step, with or without those before a resume."""
    tokens: int | None = None
    metrics: Mapping[str, Any] | None = None
    """The latest values by name. Tensors are not read yet."""

    @property
    def fraction(self) -> float | None:
        """The completed share, from 0 to 1, or None where the total is unknown."""
        return completed_fraction(
            step=self.step, total_steps=self.total_steps, epoch=self.epoch, total_epochs=self.total_epochs
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedState:
    """What an adapter adds to a checkpoint of the current step. `Checkpointer.save` describes the fields."""

    epoch: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)
    extra_files: Callable[[], Sequence[FileLayout]] = tuple
    unrequested: bool = False
    replace: bool = False


class TrainingAdapter(Protocol):
    """A training loop, as the session sees it."""

    def position(self) -> TrainingProgress:
        """Return how far the loop is. The session calls this on any thread, and from its first statement on."""

    def capture(self) -> CapturedState:
        """Describe the last completed step for a save. On the training thread of every rank."""

    def saved(self) -> None:
        """React to a save that has returned; one in the background may still be written."""

    def save_failed(self) -> None:
        """Undo what `capture` and its extra files changed in the loop."""

    def drill_parts(self) -> Mapping[str, Any] | None:
        """Return the training state in memory by name, for a drill to compare. None: compare the engine's state."""
