"""What `reprieve drill` compares of a trainer: its state in memory, at the stop and after the restart.

`ProtectedTraining` collects `training_parts` at both points, and `data_order` with the next batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from reprieve.adapters.transformers import deepspeed
from reprieve.adapters.transformers.resume import trainer_snapshot
from reprieve.adapters.transformers.resume.resumable_dataloader import ResumableDataLoader
from reprieve.checkpoint.state.fingerprint import RANDOM_NUMBERS, parts_of
from reprieve.checkpoint.state.state import State

_ORDER_KEYS = ("generators", "seeds", "samplers", "iteration")
"""The parts of a loader's state that determine the order of later batches. Workers and streaming datasets also record
how far they have read ahead, which depends on timing."""


def training_parts(trainer: Any, loader: ResumableDataLoader, epoch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the training state that this rank has in memory. `epoch`: its number, and whether it has ended."""
    snapshot = trainer_snapshot.capture(trainer).to_state()
    random_numbers = snapshot.pop("rng")
    engine_parts: dict[str, Any] = {}
    objects = {"scheduler": trainer.lr_scheduler, "scaler": trainer.accelerator.scaler}
    if trainer.is_deepspeed_enabled:
        engine_parts = deepspeed.drill_parts(trainer.model_wrapped)
    else:
        objects = {"model": trainer.model_wrapped, "optimizer": trainer.optimizer, **objects}
    state = State({name: value for name, value in objects.items() if value is not None})
    return {
        **engine_parts,
        **parts_of(state, trainer.args.process_index, rng=False),
        RANDOM_NUMBERS: random_numbers,
        "trainer state": {**snapshot, "step": trainer.state.global_step, "epoch": trainer.state.epoch},
        "data position": {**epoch, "position": loader.position},
    }


def data_order(batch: Any, loader: ResumableDataLoader) -> dict[str, Any]:
    """Return the first batch after the restart, or the batch that would have come next at the stop.

    This is apart from `training_parts` because a loader has all of its generators only once it was read from.
    """
    state = loader.state()
    return {"data order": {"batch": batch, "loader": {name: state[name] for name in _ORDER_KEYS if name in state}}}


def report_first_batch(batches: Iterator[Any], report: Callable[[Any], None]) -> Iterator[Any]:
    """Yield the same batches, and pass the first one to `report`."""
    for batch in batches:
        report(batch)
        yield batch
        break
    yield from batches
