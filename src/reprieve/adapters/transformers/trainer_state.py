"""What Reprieve saves of a Trainer besides Hugging Face's own files: the value `transformers` of a checkpoint.

Every rank writes its own when a checkpoint is saved (`training.py`) and reads it once on resume (`resume/hooks.py`).
Names on disk are older than the names of the fields and stay as they are: docs/format.md, "State of a Trainer".
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from reprieve.errors import StateMismatch

VERSION = 1
"""The version that this code writes. Checkpoints without one are older and may lack the fields that have a default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSnapshot:
    """The attributes of a trainer that decide how training continues and that no file of Hugging Face's holds."""

    rng: Mapping[str, Any]
    """Global random number generators. Stock saves them too, but restores them at another point of the loop."""
    model_is_training: bool = field(metadata={"key": "training"})
    """Whether the model is in training mode: TRL logs the averages of that mode."""
    control_flags: Mapping[str, bool] = field(metadata={"key": "flags"})
    """`TrainerControl`: what is still due at this step (log, evaluate, save, end the epoch, end the training)."""
    loss_since_log: float = field(metadata={"key": "tr_loss"})
    """The sum of losses since the last log line."""
    loss_attributes: Mapping[str, Any] = field(metadata={"key": "losses"})
    """Total loss and the step of the last log line, under the trainer's attribute names."""
    trl_attributes: Mapping[str, Any] = field(metadata={"key": "trl"})
    """TRL's averages since the last log line and GRPO's position in a batch of generations."""
    evaluation_loaders: Sequence[str] = ()
    """Keys of evaluation DataLoaders whose persistent workers have started: they draw no more seeds."""

    def to_state(self) -> dict[str, Any]:
        return _to_state(self)

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> TrainerSnapshot:
        return cls(**_values(cls, state))


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerState:
    """How far a trainer's loop is, and what it needs to continue at the next batch."""

    epoch: int
    """The epoch that is running, counted from 0."""
    epoch_ended: bool = field(metadata={"key": "ended"})
    """All steps of the epoch are done; what follows an epoch (evaluation, save) may still be due."""
    data_position: Mapping[str, Any] = field(metadata={"key": "position"})
    """The position in the pass over the DataLoader (`reprieve.data`)."""
    loader_state: Mapping[str, Any] | None = field(metadata={"key": "source"})
    """What the next pass depends on: the DataLoader's generators, samplers and persistent workers."""
    snapshot: TrainerSnapshot = field(metadata={"key": "moment"})
    last_log: Mapping[str, float | None] = field(metadata={"key": "last"})
    """`grad_norm` and `learning_rate` of the last step, for a log line that is written only after the resume."""
    ddp_buckets: Sequence[str] = field(metadata={"key": "buckets"})
    """The order of DDP's gradient buckets, which decides the order of summation."""
    max_steps: int
    """After how many steps training was to end."""
    world_size: int
    batch_size: int
    """Samples in a batch of one rank."""
    gradient_accumulation_steps: int = field(metadata={"key": "accumulation"})
    extra_steps: int = field(default=0, metadata={"key": "more_steps"})
    """Steps beyond what the epochs have, because earlier steps had another size."""
    num_train_epochs: int = field(default=0, metadata={"key": "epochs"})
    elapsed_s: float = field(metadata={"key": "seconds"})
    """Training time of all attempts."""
    script_checkpoint: str | None = field(metadata={"key": "given"})
    """The path that the script passed as `resume_from_checkpoint`."""
    tracker_runs: Mapping[str, str] = field(metadata={"key": "followers"})
    """Run IDs of the experiment trackers."""
    save_requested: bool = field(default=True, metadata={"key": "requested"})
    """The script's save strategy requested this checkpoint; otherwise a stop or `every` did."""
    log_key_orders: Sequence[Sequence[str]] = field(default=(), metadata={"key": "log_keys"})
    """The order of keys in entries of the log history, which trainer_state.json sorts."""
    generation_changes: Mapping[str, Sequence[Any]] = field(default_factory=dict, metadata={"key": "generation"})
    """What evaluations changed in the model's generation_config: name → [before, after]."""

    def to_state(self) -> dict[str, Any]:
        """The state in types that `torch.load(weights_only=True)` loads."""
        return {"version": VERSION, **_to_state(self), "moment": self.snapshot.to_state()}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> TrainerState:
        version = state.get("version", VERSION)
        if not isinstance(version, int) or version > VERSION:
            raise StateMismatch(
                f"the checkpoint holds a trainer state of version {version}, and this version of Reprieve reads "
                f"versions up to {VERSION}: upgrade Reprieve, or start over (reprieve run --fresh)"
            )
        values = _values(cls, state)
        return cls(**{**values, "snapshot": TrainerSnapshot.from_state(values["snapshot"])})


def _key(of: dataclasses.Field[Any]) -> str:
    return str(of.metadata.get("key", of.name))


def _to_state(instance: Any) -> dict[str, Any]:
    return {_key(each): getattr(instance, each.name) for each in dataclasses.fields(instance)}


def _values(cls: type, state: Mapping[str, Any]) -> dict[str, Any]:
    """The values of the fields that `state` has. A missing one takes its default."""
    found = {each.name: state[_key(each)] for each in dataclasses.fields(cls) if _key(each) in state}
    required = (each for each in dataclasses.fields(cls) if each.default is each.default_factory is dataclasses.MISSING)
    if missing := [_key(each) for each in required if each.name not in found]:
        raise StateMismatch(f"the checkpoint's trainer state lacks {', '.join(missing)}: it was not saved by Reprieve")
    return found
