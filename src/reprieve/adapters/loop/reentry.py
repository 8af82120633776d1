"""The way of a resumed script back to the point where the interrupted process was.

A resumed script runs from its top. Its set-up code may draw random numbers, and its calls of `batches` come again in
the same order. `Reentry` hands each call the pass that it continues and restores the random numbers when the loop is
back at the restored step.

If the stop was in an evaluation in the body of a loop over batches, behind `step`, the body has to run up to `step`
to get there. `Reentry` lends it a batch, and undoes the effect of training on it at `step`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from reprieve.adapters.loop.loop_position import DataPass, LoopPosition, SuspendedPass
from reprieve.adapters.loop.loop_state import LoopState, PassState
from reprieve.checkpoint.results import Restored
from reprieve.errors import ConfigError, StateMismatch
from reprieve.rng import capture_rng, restore_rng


class Reentry:
    """What is left to do until a resumed loop is where it was. Without a resume: nothing."""

    def __init__(self, loop: LoopPosition, generators: Mapping[str, torch.Generator]) -> None:
        self.tail = False
        """The rest of the loop's body, after `step`, still has to run for the last step. Saved with a checkpoint."""
        self.batch_is_lent = False
        """A batch is lent, and `step` was not called for it yet."""
        self._loop = loop
        self._generators = generators
        self._passes: list[PassState] = []
        """Passes of the interrupted epoch that the script has not called for yet."""
        self._rng: dict[str, Any] | None = None
        """The random numbers at the restored step. None: the loop is there."""

    def begin(self, state: LoopState) -> None:
        """Start from a checkpoint whose random numbers have just been restored."""
        self._rng = capture_rng(self._generators)
        self._passes = list(state.passes)
        self.tail = state.tail

    def restore_rng(self) -> None:
        """Undo what was drawn since `begin`."""
        if self._rng is not None:
            restore_rng(self._rng, self._generators)

    def enter(self) -> None:
        """The loop is where the interrupted process was."""
        self.restore_rng()
        self._rng = None

    def enter_epoch(self) -> None:
        """An epoch begins. It is where the interrupted process was if that had not begun a pass of it."""
        if not self._passes:
            self.enter()

    def leave_epoch(self) -> None:
        self._passes = []

    def next_pass(self) -> PassState | None:
        """Return the pass that the next call of `batches` continues, or None for a new one. A complete pass has no
        position; behind the last of them the loop is where it was."""
        if not self._passes:
            return None
        resumed = self._passes.pop(0)
        if resumed.state is None:
            self.restore_rng()
            if not self._passes:
                self._rng = None
        return resumed

    def lend_batch(self, data_pass: DataPass, position: Mapping[str, Any] | None) -> Iterator[Any]:
        """Yield one batch to get behind `step`: the next of the pass or, at its end, any."""
        self.tail = False
        source = self._loop.sources[data_pass.source]
        for start in (position, None):
            trial = source.start(start)
            batch = next(trial, None)
            trial.close()
            self._loop.restore_source(data_pass.source)
            if batch is not None:
                break
        self.batch_is_lent = True
        data_pass.iterator = SuspendedPass()
        yield batch
        if self.batch_is_lent:
            raise ConfigError(
                "run.step() was not called for the first batch after a stop in an evaluation. The script has to call "
                "it to get back into the evaluation; with gradient accumulation, decide by `run.batch`, which "
                "continues counting after a resume"
            )

    def take_back(self, restored: Restored | None, metrics: Mapping[str, Any]) -> None:
        """`step` was called for the lent batch, and the checkpoint was restored once more: enter the evaluation."""
        self.batch_is_lent = False
        assert restored is not None
        if restored.step != self._loop.steps:
            raise StateMismatch(f"{restored.path} is not of step {self._loop.steps}, from which the run was resumed")
        saved = LoopState.from_state(restored.values["loop"]).metrics
        for name, value in metrics.items():
            # Code between `step` and the evaluation runs a second time, and should log the same `loss.item()`.
            if isinstance(value, torch.Tensor):
                value.data.fill_(saved.get(name, math.nan))
        self.enter()
