"""A plain loop, as the session sees it (`session/adapter.py`).

`Run` changes what is held here while the script trains; the session reads it for reports and saves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from reprieve.adapters.loop.loop_position import LoopPosition
from reprieve.adapters.loop.loop_state import LoopState
from reprieve.adapters.loop.reentry import Reentry
from reprieve.adapters.loop.sample_counter import SampleCounter
from reprieve.adapters.loop.step_timer import StepTimer
from reprieve.session.adapter import CapturedState, TrainingProgress


@dataclass(frozen=True, slots=True)
class RunningEvaluation:
    """The state before an evaluation, to which a stop in it goes back."""

    source: int
    """Index of its loader in `LoopPosition.sources`."""
    source_state: dict[str, Any]
    rng: dict[str, Any]


class LoopAdapter:
    """The state of a plain loop: a `TrainingAdapter`."""

    def __init__(self, generators: Mapping[str, torch.Generator]) -> None:
        self.loop = LoopPosition()
        self.reentry = Reentry(self.loop, generators)
        self.counter = SampleCounter()
        self.timer = StepTimer()
        self.metrics: dict[str, Any] = {}
        self.target: list[int | None] = [None, None]
        """The epochs and steps that the script requested."""
        self.evaluation: RunningEvaluation | None = None
        self.bucket_orders: Mapping[str, Any] = {}
        """By the name of the DDP module; known after its first step."""

    def position(self) -> TrainingProgress:
        epochs, steps = self.target
        return TrainingProgress(
            step=self.loop.steps,
            total_steps=steps,
            epoch=self.loop.epochs_done(),
            total_epochs=epochs,
            samples=self.counter.samples,
            tokens=self.counter.tokens,
            metrics=self.metrics,
        )

    def capture(self) -> CapturedState:
        loop, evaluation = self.loop, self.evaluation
        sources = [source.state() for source in loop.sources]
        if evaluation is not None:
            sources[evaluation.source] = evaluation.source_state
        metrics = {name: float(value) for name, value in self.metrics.items()}
        state = LoopState(
            steps=loop.steps,
            epoch=loop.epoch,
            world_size=self.counter.world_size,
            passes=[data_pass.state() for data_pass in loop.passes],
            sources=sources,
            tail=self.reentry.tail,
            metrics=metrics,
            ddp=self.bucket_orders,
        )
        return CapturedState(epoch=loop.epoch, metrics=metrics, values={"loop": state.to_state()})

    def saved(self) -> None:
        self.timer.interrupted()

    def save_failed(self) -> None:
        pass

    def drill_parts(self) -> None:
        return None
