"""Where a resumed training continues, decided without a training."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from torch.utils.data import DataLoader

from reprieve.adapters.transformers.resume.resumable_dataloader import ResumableDataLoader
from reprieve.adapters.transformers.resume.resume_position import (
    ResumePosition,
    count_remaining_steps,
    find_position,
)
from reprieve.adapters.transformers.trainer_state import TrainerState
from reprieve.data.positions import PassPosition
from tests.unit.adapters.transformers.test_trainer_state import STATE

SAVED = replace(TrainerState.from_state(STATE), world_size=1, loader_state={}, extra_steps=0, num_train_epochs=2)
"""Stopped in the second epoch, after 3 batches of 4 samples on one rank."""


def _trainer(batch_size: int, *, max_steps: int = -1) -> Any:
    config = SimpleNamespace(use_seedable_sampler=True)
    args = SimpleNamespace(
        world_size=1,
        gradient_accumulation_steps=1,
        max_steps=max_steps,
        train_sampling_strategy="random",
        accelerator_config=config,
    )
    return SimpleNamespace(args=args, _train_batch_size=batch_size)


def _loader(batch_size: int) -> ResumableDataLoader:
    return ResumableDataLoader(DataLoader(list(range(40)), batch_size))  # type: ignore[arg-type]


def _position(batch_size: int, consumed: int) -> dict[str, Any]:
    """A position as the DataLoader of the interrupted process gave it."""
    loader = _loader(batch_size)
    batches = iter(loader)
    for _ in range(consumed):
        next(batches)
    loader.mark()
    return loader.position


def _find(batch_size: int, saved: TrainerState = SAVED) -> ResumePosition:
    return find_position(saved, _trainer(batch_size), _loader(batch_size), 40 // batch_size)


def test_an_unchanged_step_keeps_the_position() -> None:
    found = _find(4)
    assert not found.step_size_changed
    assert (found.epoch, found.data_position, found.ddp_buckets) == (1, PassPosition(consumed=3), ["weight"])
    assert (
        count_remaining_steps(found, _trainer(4), step=13, steps_in_epoch=10, batches_in_epoch=10, max_steps=20)
        is found
    )


def test_smaller_batches_redistribute_the_rest_of_the_epoch(caplog: pytest.LogCaptureFixture) -> None:
    """12 of 40 samples are done: 14 batches of 2 remain, where 10 batches of 4 made an epoch."""
    found = _find(2, replace(SAVED, data_position=_position(4, 3)))
    assert found.data_position.consumed == 6
    assert found.epoch_batches == 20
    assert found.ddp_buckets == []
    assert "1 × 1 × 4 samples in a step" in caplog.text
    assert "12 samples of this epoch are done" in caplog.text
    counted = count_remaining_steps(found, _trainer(2), step=13, steps_in_epoch=20, batches_in_epoch=20, max_steps=40)
    assert counted.extra_steps == 13 + 14 - 40


def test_a_limit_of_steps_may_need_more_epochs() -> None:
    found = _find(2, replace(SAVED, data_position=_position(4, 3)))
    counted = count_remaining_steps(
        found, _trainer(2, max_steps=60), step=13, steps_in_epoch=20, batches_in_epoch=20, max_steps=60
    )
    assert counted.min_epochs == 2 + 2, "33 steps follow the interrupted epoch"


def test_an_epoch_that_ended_stays_ended() -> None:
    found = _find(2, replace(SAVED, epoch_ended=True, data_position=_position(4, 10)))
    assert found.data_position.consumed == 20
    assert found.data_position.ended
    assert found.epoch_batches is None


def test_an_unknown_way_to_make_batches_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    found = _find(2)  # {"consumed": 3} does not say what a batch took off the order
    assert found.loader_state is None
    assert found.data_position == PassPosition(consumed=6)
    assert "some samples may be repeated and others skipped" in caplog.text
