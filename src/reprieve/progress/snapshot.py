"""The nouns of progress: what is known of a run at one moment. `Tracker` makes them, sinks tell them.

Plain Python and frozen, so they can be handed to any thread. None always means: not known.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from reprieve.run_state import RunState

_ENDED_STATES = (RunState.STOPPED, RunState.FAILED, RunState.FINISHED)
STATES = (RunState.STARTING, RunState.TRAINING, RunState.EVALUATING, RunState.SAVING, *_ENDED_STATES)
"""The states that a training process reports."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoints:
    """Of one run."""

    enabled: bool = True
    """Is anything saved before the end: periodically, or when the run is told to stop?"""
    latest: str | None = None
    """Where the newest durable one is."""
    latest_at: float | None = None
    """When it became durable, in seconds since the epoch; of one from before the resume, when it was begun."""
    latest_bytes: int | None = None
    created: int = 0
    valid: int | None = None
    """How many can be resumed from."""
    saving: int | None = None
    """The step that is being saved."""
    saving_fraction: float | None = None
    """How much of it is written, from 0 to 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a run is."""

    at: float
    """When something was last heard of training, in seconds since the epoch: no fresher than what it tells."""
    state: RunState = RunState.STARTING
    reason: str | None = None
    """Why it was stopped or failed."""
    saved: bool | None = None
    """Of a run that was stopped: is its last step saved?"""
    step: int = 0
    total_steps: int | None = None
    epoch: float | None = None
    """How many epochs are done: 1.5 is the middle of the second."""
    total_epochs: float | None = None
    percent: float | None = None
    """100 when the run is finished, and not before."""
    eta_s: float | None = None
    """0 when the run is finished, and not before."""
    loss: float | None = None
    accuracy: float | None = None
    validation_loss: float | None = None
    validation_accuracy: float | None = None
    learning_rate: float | None = None
    gradient_norm: float | None = None
    samples_per_s: float | None = None
    tokens_per_s: float | None = None
    resumed_from: int | None = None
    """The step that this session goes on from."""
    restarts: int = 0
    train: Mapping[str, float] = field(default_factory=dict)
    """Whatever numbers training logged, by their own names."""
    evaluation: Mapping[str, float] = field(default_factory=dict)
    checkpoints: Checkpoints = field(default_factory=Checkpoints)

    @property
    def ended(self) -> bool:
        """Nothing more will come."""
        return self.state in _ENDED_STATES
