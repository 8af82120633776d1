"""What `reprieve drill` compares of a trainer: its state in memory, at the stop and after the restart."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from reprieve.adapters.transformers import deepspeed
from reprieve.adapters.transformers.resume import trainer_snapshot
from reprieve.adapters.transformers.resume.resumable_dataloader import ResumableDataLoader
from reprieve.checkpoint.state.fingerprint import RANDOM_NUMBERS, parts_of
from reprieve.checkpoint.state.state import State

_ORDER = ("generators", "seeds", "samplers", "iteration")
"""What the order of later batches follows from, of a loader's state. Workers and streaming datasets also say how far
they have read ahead, which is a matter of timing."""


def parts(trainer: Any, loader: ResumableDataLoader, where: Mapping[str, Any]) -> dict[str, Any]:
    """The state of a training, as this rank has it in memory. `where`: its place in the epochs."""
    now = trainer_snapshot.capture(trainer)
    random_numbers = now.pop("rng")
    found: dict[str, Any] = {}
    objects = {"scheduler": trainer.lr_scheduler, "scaler": trainer.accelerator.scaler}
    if trainer.is_deepspeed_enabled:
        found = deepspeed.parts(trainer.model_wrapped)
    else:
        objects = {"model": trainer.model_wrapped, "optimizer": trainer.optimizer, **objects}
    state = State({name: value for name, value in objects.items() if value is not None})
    return {
        **found,
        **parts_of(state, trainer.args.process_index, rng=False),
        RANDOM_NUMBERS: random_numbers,
        "trainer state": {**now, "step": trainer.state.global_step, "epoch": trainer.state.epoch},
        "data position": {**where, "position": loader.position},
    }


def data_order(batch: Any, loader: ResumableDataLoader) -> dict[str, Any]:
    """The first batch after the restart, or at the stop the one that would have come next. A loader has all of its
    generators only when it was read from: hence this apart from `parts`."""
    found = loader.state()
    return {"data order": {"batch": batch, "loader": {name: found[name] for name in _ORDER if name in found}}}


def watch_first(batches: Iterator[Any], report: Callable[[Any], None]) -> Iterator[Any]:
    """The same batches; the first one is reported."""
    for batch in batches:
        report(batch)
        yield batch
        break
    yield from batches
