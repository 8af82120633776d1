"""A batch that is lent: the way back into an evaluation in the middle of a pass.

The interrupted process stopped in an evaluation that stands in the body of a loop over batches, behind `step`. To come
there again the body has to run up to `step`: with a batch that is lent to it, and whose effect is undone there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from reprieve.adapters.loop.loop_position import DataPass, LoopPosition, SuspendedPass
from reprieve.checkpoint.checkpointer import Checkpointer
from reprieve.errors import ConfigError, StateMismatch


class EvaluationReentry:
    """For one run."""

    def __init__(self, place: LoopPosition, checkpointer: Checkpointer) -> None:
        self._place = place
        self._checkpointer = checkpointer
        self.out = False
        """A batch is lent, and `step` was not called for it yet."""

    def lend(self, one: DataPass, position: Mapping[str, Any] | None) -> Iterator[Any]:
        """One batch: the next of the pass or, at its end, any."""
        source = self._place.sources[one.source]
        for start in (position, None):
            trial = source.start(start)
            lent = next(trial, None)
            trial.close()
            self._place.restore_source(one.source)
            if lent is not None:
                break
        self.out = True
        one.going = SuspendedPass()
        yield lent
        if self.out:
            raise ConfigError(
                "after a stop in an evaluation in the middle of a pass, run.step() must be called for the batch that "
                "was given out. With gradient accumulation ask `run.batch`, which counts on over a resume"
            )

    def take_back(self, metrics: Mapping[str, Any]) -> None:
        """`step` was called: everything is as it was when the evaluation began."""
        self.out = False
        restored = self._checkpointer.restore()
        assert restored is not None
        if restored.step != self._place.steps:
            raise StateMismatch(f"{restored.path} is not of step {self._place.steps}, from which the run was resumed")
        for name, value in metrics.items():
            # What is between `step` and the evaluation runs a second time, and should say the same: `loss.item()`.
            if isinstance(value, torch.Tensor):
                value.data.fill_(restored.values["loop"]["metrics"].get(name, math.nan))
