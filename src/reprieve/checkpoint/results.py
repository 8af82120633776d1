"""What a Checkpointer returns: `Save` for a requested save, `Restored` for a resume."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reprieve.checkpoint.restore.resume import PassedOver
from reprieve.checkpoint.save.result import Save

__all__ = ["Restored", "Save"]


@dataclass(frozen=True, slots=True)
class Restored:
    """The checkpoint that a run resumes from."""

    step: int
    epoch: float | None
    path: Path
    values: Mapping[str, Any]
    """The plain values that were given to `save`."""
    metrics: Mapping[str, float]
    passed_over: list[PassedOver]
    """Newer checkpoints that could not be used, and why."""
    finished: Any = None
    """What `mark_finished` recorded with this step: there is nothing left to train. None: the run was not finished."""
