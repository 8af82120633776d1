"""Computes where in the data a resumed training continues, in batches of this process.

The interrupted process may have had another batch size, number of batches in a step or number of ranks. Then the rest
of the epoch is redistributed, and the number of steps that remain is computed anew. `hooks.py` does both once the
trainer knows its DataLoader: `find_position`, then `count_remaining_steps`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from transformers.trainer_utils import has_length

from reprieve.adapters.transformers.resume.resumable_dataloader import ResumableDataLoader
from reprieve.adapters.transformers.trainer_state import TrainerState
from reprieve.data.positions import PassPosition

log = logging.getLogger("reprieve")


@dataclass(frozen=True, slots=True)
class StepSize:
    """What an optimizer step consists of: `world_size` × `accumulation` batches of `batch_size` samples."""

    world_size: int
    batch_size: int
    accumulation: int

    @classmethod
    def of(cls, trainer: Any) -> StepSize:
        args = trainer.args
        return cls(args.world_size, trainer._train_batch_size, args.gradient_accumulation_steps)

    @classmethod
    def saved_in(cls, saved: TrainerState) -> StepSize:
        return cls(saved.world_size, saved.batch_size, saved.gradient_accumulation_steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumePosition:
    """Where a resumed training continues."""

    epoch: int
    epoch_ended: bool
    data_position: PassPosition
    loader_state: Mapping[str, Any] | None
    """None: the state of the interrupted process's DataLoader does not fit this one."""
    ddp_buckets: Sequence[str]
    step_size_changed: bool
    epoch_batches: int | None = None
    """Batches in the interrupted epoch; None: as many as in every epoch."""
    extra_steps: int = 0
    """Steps beyond what the epochs have, because earlier steps had another size."""
    min_epochs: int = 0
    """Epochs needed to reach `max_steps`, where the script limits the number of steps."""


def find_position(
    saved: TrainerState, trainer: Any, loader: ResumableDataLoader, batches_in_epoch: int, *, more_steps: bool = False
) -> ResumePosition:
    """Convert the saved position into batches of this process.

    `more_steps`: training was complete, and more steps are requested now.
    """
    before, now = StepSize.saved_in(saved), StepSize.of(trainer)
    # The last step ended its epoch for the trainer, wherever that was in the data.
    was_left = saved.epoch_ended and more_steps
    found = ResumePosition(
        epoch=saved.epoch,
        epoch_ended=saved.epoch_ended and not was_left,
        data_position=PassPosition.from_state(saved.data_position),
        loader_state=saved.loader_state,
        ddp_buckets=saved.ddp_buckets,
        step_size_changed=now != before,
        extra_steps=saved.extra_steps,
        min_epochs=saved.num_train_epochs,
    )
    if found.step_size_changed:
        found = _redistribute(found, trainer, loader, before, now)
    position, epoch_batches = found.data_position, None
    is_redistributed = position.redistribution is not None
    is_over = found.epoch_ended or position.ended
    if is_redistributed and not is_over:
        epoch_batches = loader.length(position.to_state())
        is_over = epoch_batches is not None and epoch_batches <= position.consumed
    elif was_left and has_length(loader):
        is_over = is_over or batches_in_epoch <= position.consumed
    found = replace(found, epoch_ended=is_over if was_left else found.epoch_ended)
    if is_over and (found.step_size_changed or is_redistributed) and has_length(loader):
        return replace(found, data_position=replace(position, consumed=batches_in_epoch, ended=True))
    return replace(found, epoch_batches=epoch_batches)


def _redistribute(
    found: ResumePosition, trainer: Any, loader: ResumableDataLoader, before: StepSize, now: StepSize
) -> ResumePosition:
    """Divide the rest of the epoch into batches of the new size, and log a warning."""
    position = found.data_position
    loader_state: dict[str, Any] | None
    loader_state = {name: value for name, value in (found.loader_state or {}).items() if name != "workers"}
    redistributed = loader.redistribute(position.to_state(), now.accumulation)
    if redistributed is None:
        loader_state = None
        samples_done = position.consumed * before.world_size * before.batch_size
        batches = samples_done // (now.world_size * now.batch_size)
        new_position = PassPosition(
            consumed=batches // now.accumulation * now.accumulation,
            start_rng=position.start_rng,
            iteration=position.iteration,
            ended=position.ended,
        )
        caveat = (
            "; some samples may be repeated and others skipped: the DataLoader does not expose how it makes batches"
        )
    else:
        new_position = PassPosition.from_state(redistributed)
        samples_done = new_position.redistribution.samples if new_position.redistribution is not None else 0
        caveat = _order_caveat(trainer, before, now)
    log.warning(
        "the checkpoint has %d × %d × %d samples in a step (ranks × batches × batch size), and this run has "
        "%d × %d × %d: it resumes at the same position in the data (%d samples of this epoch are done), but is no "
        "longer bit for bit equal to an undisturbed run%s",
        before.world_size,
        before.accumulation,
        before.batch_size,
        now.world_size,
        now.accumulation,
        now.batch_size,
        samples_done,
        caveat,
    )
    return replace(found, data_position=new_position, loader_state=loader_state, ddp_buckets=[])


def _order_caveat(trainer: Any, before: StepSize, now: StepSize) -> str:
    """What to add to the warning where the order of the samples depends on the step size."""
    args = trainer.args
    is_grouped = args.train_sampling_strategy == "group_by_length"
    if is_grouped and now.batch_size * now.accumulation != before.batch_size * before.accumulation:
        reason = "samples grouped by length come in another order in steps of this size"
    elif not args.accelerator_config.use_seedable_sampler and (before.world_size == 1) != (now.world_size == 1):
        reason = "with use_seedable_sampler=False, a single process orders samples differently from several"
    else:
        return ""
    return f"; {reason}: some samples of this epoch are repeated, others skipped"


def count_remaining_steps(
    position: ResumePosition, trainer: Any, *, step: int, steps_in_epoch: int, batches_in_epoch: int, max_steps: int
) -> ResumePosition:
    """Compute `extra_steps` or `min_epochs` after `step`, where earlier steps had another size.

    `max_steps` is the script's limit or, without one, the number of steps in all epochs.
    """
    if not position.step_size_changed:
        return position
    epoch_steps = steps_of(trainer, position.epoch_batches or batches_in_epoch)
    remaining = epoch_steps - steps_of(trainer, position.data_position.consumed)
    if trainer.args.max_steps > 0:
        later_epochs = math.ceil(max(max_steps - step - remaining, 0) / steps_in_epoch)
        return replace(position, min_epochs=position.epoch + 1 + later_epochs)
    extra_steps = step + remaining - (position.epoch + 1) * steps_in_epoch
    return replace(position, extra_steps=max(extra_steps, step - max_steps))


def steps_of(trainer: Any, batches: int) -> int:
    """The number of optimizer steps that so many batches make."""
    return math.ceil(batches / int(trainer.args.gradient_accumulation_steps))
