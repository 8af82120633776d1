"""The state of a Trainer in a checkpoint: what is written, and which versions are read."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch

from reprieve.adapters.transformers.trainer_state import TrainerSnapshot, TrainerState
from reprieve.errors import StateMismatch

SNAPSHOT = {
    "rng": {"cpu": torch.get_rng_state()},
    "training": True,
    "flags": {"should_save": True},
    "tr_loss": 0.5,
    "losses": {"_total_loss_scalar": 2.0},
    "trl": {},
    "evaluation_loaders": ["eval"],
}

STATE: dict[str, Any] = {
    "epoch": 1,
    "ended": False,
    "position": {"consumed": 3},
    "source": {"generators": []},
    "moment": SNAPSHOT,
    "last": {"grad_norm": 1.0, "learning_rate": None},
    "buckets": ["weight"],
    "max_steps": 20,
    "world_size": 2,
    "batch_size": 4,
    "accumulation": 1,
    "more_steps": 2,
    "epochs": 3,
    "seconds": 1.5,
    "given": None,
    "followers": {"wandb": "run-1"},
    "requested": False,
    "log_keys": [["loss", "step"]],
    "generation": {"max_length": [None, 20]},
}
"""What Reprieve 0.1.0 wrote."""


def test_the_keys_on_disk_stay_and_a_version_is_added() -> None:
    assert TrainerState.from_state(STATE).to_state() == {"version": 1, **STATE}


def test_a_written_state_is_read_with_weights_only() -> None:
    state = TrainerState.from_state(STATE)
    file = io.BytesIO()
    torch.save(state.to_state(), file)
    file.seek(0)
    loaded = TrainerState.from_state(torch.load(file, weights_only=True))
    assert loaded.tracker_runs == {"wandb": "run-1"}
    assert loaded.snapshot.evaluation_loaders == ["eval"]


def test_fields_that_older_checkpoints_lack_have_defaults() -> None:
    newer = ("more_steps", "epochs", "requested", "log_keys", "generation")
    old = {key: value for key, value in STATE.items() if key not in newer}
    old["moment"] = {key: value for key, value in SNAPSHOT.items() if key != "evaluation_loaders"}
    state = TrainerState.from_state(old)
    assert (state.extra_steps, state.num_train_epochs, state.save_requested) == (0, 0, True)
    assert (state.log_key_orders, state.generation_changes) == ((), {})
    assert state.snapshot.evaluation_loaders == ()


@pytest.mark.parametrize("version", [2, "1"])
def test_an_unknown_version_is_refused(version: object) -> None:
    with pytest.raises(StateMismatch, match=f"trainer state of version {version}.*upgrade Reprieve"):
        TrainerState.from_state({**STATE, "version": version})


def test_a_missing_field_is_named() -> None:
    with pytest.raises(StateMismatch, match="lacks position, accumulation"):
        TrainerState.from_state({key: STATE[key] for key in STATE.keys() - {"position", "accumulation"}})
    with pytest.raises(StateMismatch, match="lacks flags"):
        TrainerSnapshot.from_state({key: SNAPSHOT[key] for key in SNAPSHOT.keys() - {"flags"}})
