"""Snapshots of a run's progress: `Tracker` creates them, sinks publish them.

They are frozen and hold only plain Python values, so that any thread can use them. None always means: unknown.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from reprieve.run_state import RunState

_ENDED_STATES = (RunState.STOPPED, RunState.FAILED, RunState.FINISHED)
STATES = (
    RunState.STARTING,
    RunState.TRAINING,
    RunState.EVALUATING,
    RunState.SAVING,
    RunState.WAITING,  # of a run on Ray, whose workers restart
    *_ENDED_STATES,
)
"""The states that a run reports."""


MAX_LISTED = 20
"""How many checkpoints are listed at most: operators copy the list into a status."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedCheckpoint:
    """One checkpoint in the folder of a run."""

    path: str
    step: int
    created_at: float
    """When its save began, in seconds since the epoch."""
    bytes: int
    problem: str | None = None
    """Why it cannot be resumed from; None: no problem is known."""
    epoch: float | None = None
    """Completed epochs; None: foreign checkpoints do not have it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoints:
    """The checkpoints of one run."""

    enabled: bool = True
    """Whether anything is saved before the end: periodically, or at a stop request."""
    latest: str | None = None
    """The path of the newest durable checkpoint."""
    latest_at: float | None = None
    """When it became durable, in seconds since the epoch; for the one that was resumed from, when its save began."""
    latest_bytes: int | None = None
    created: int | None = None
    """How many became durable, in all attempts of the run."""
    last_save_s: float | None = None
    """How long the last save of this session took until it was durable."""
    listed: tuple[ListedCheckpoint, ...] = ()
    """What is in the folder, newest first, `MAX_LISTED` at most."""
    valid: int | None = None
    """The number of valid checkpoints."""
    saving: int | None = None
    """The step of the save in progress."""
    saving_fraction: float | None = None
    """The written fraction of that save, from 0 to 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a run is, at one moment."""

    at: float
    """When training last reported anything, in seconds since the epoch."""
    run: str | None = None
    """The name of the run."""
    state: RunState = RunState.STARTING
    reason: str | None = None
    """Why the run stopped or failed."""
    saved: bool | None = None
    """Whether the last step of a stopped run is saved."""
    step: int = 0
    total_steps: int | None = None
    epoch: float | None = None
    """The number of completed epochs: 1.5 is the middle of the second."""
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
    """The step that this session resumed from."""
    restarts: int | None = None
    train: Mapping[str, float] = field(default_factory=dict)
    """All numbers that training logged, by their own names."""
    evaluation: Mapping[str, float] = field(default_factory=dict)
    checkpoints: Checkpoints = field(default_factory=Checkpoints)

    @property
    def ended(self) -> bool:
        """Whether this is the last snapshot."""
        return self.state in _ENDED_STATES

    def to_json(self) -> bytes:
        """For another process of the same version, which publishes it."""
        return json.dumps(dataclasses.asdict(self)).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Progress:
        content = json.loads(data)
        checkpoints = content.pop("checkpoints")
        listed = tuple(ListedCheckpoint(**each) for each in checkpoints.pop("listed"))
        state = RunState(content.pop("state"))
        return cls(**content, state=state, checkpoints=Checkpoints(**checkpoints, listed=listed))
