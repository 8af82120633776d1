"""Where a training was, in batches of today: they may be others than those before, of other ranks.

What every rank has saved of the loop (`Training._values`), and on top:

    changed      the batches are others
    length       of the epoch that was interrupted, in batches, if that is not as many as the others have
    more_steps   than so many epochs would have: some were done in steps of another size
    epochs       at least so many, where the number of steps is limited
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

from transformers.trainer_utils import has_length

from reprieve.adapters.transformers.resume.resumable_dataloader import ResumableDataLoader

log = logging.getLogger("reprieve")


def find(saved: Mapping[str, Any], trainer: Any, loader: ResumableDataLoader, batches: int) -> dict[str, Any]:
    """What was saved of the loop, put into the batches of this process; an epoch has so many of them."""
    args, position = trainer.args, saved["position"]
    now = args.world_size, trainer._train_batch_size, args.gradient_accumulation_steps
    then = saved["world_size"], saved["batch_size"], saved["accumulation"]
    found = {**saved, "length": None, "changed": now != then}
    if found["changed"]:
        found |= _dealt_again(saved, trainer, loader)
        position = found["position"]
    over = saved["ended"] or position.get("ended")
    if "dealt" in position and not over:
        found["length"] = loader.length(position)
        over = found["length"] is not None and found["length"] <= position["consumed"]
    if over and (found["changed"] or "dealt" in position) and has_length(loader):
        found |= {"length": None, "position": {**position, "consumed": batches, "ended": True}}
    return found


def _dealt_again(saved: Mapping[str, Any], trainer: Any, loader: ResumableDataLoader) -> dict[str, Any]:
    args, position = trainer.args, saved["position"]
    ranks, size, count = args.world_size, trainer._train_batch_size, args.gradient_accumulation_steps
    done = position["consumed"] * saved["world_size"] * saved["batch_size"]
    source: dict[str, Any] | None = {name: value for name, value in saved["source"].items() if name != "workers"}
    dealt = loader.deal_again(position, count)
    if dealt is None:
        source, dealt = None, {name: position[name] for name in ("start", "iteration", "ended") if name in position}
        dealt["consumed"] = done // (ranks * size) // count * count
        but = "; some of them may come again and some others not, because its loader does not say how it makes batches"
    else:
        done = dealt["dealt"]["samples"] if "dealt" in dealt else 0
        but = _reordered(saved, trainer)
    log.warning(
        "the checkpoint was written by %d ranks with %d batches of %d in a step, these are %d with %d of %d: the run "
        "goes on at the same place in the data (%d samples of this epoch are done), but no longer bit for bit as it "
        "would%s",
        saved["world_size"],
        saved["accumulation"],
        saved["batch_size"],
        ranks,
        count,
        size,
        done,
        but,
    )
    return {"position": dealt, "source": source, "buckets": []}


def _reordered(saved: Mapping[str, Any], trainer: Any) -> str:
    """The order of the samples hangs on what has changed: what to say of it."""
    args = trainer.args
    in_step = trainer._train_batch_size * args.gradient_accumulation_steps
    if args.train_sampling_strategy == "group_by_length" and in_step != saved["batch_size"] * saved["accumulation"]:
        why = "samples grouped by length come in another order in such steps"
    elif not args.accelerator_config.use_seedable_sampler and (saved["world_size"] == 1) != (args.world_size == 1):
        why = "with use_seedable_sampler=False one process and several have different orders"
    else:
        return ""
    return f"; {why}: of this epoch some come again, some not"


def count(place: dict[str, Any], trainer: Any, step: int, in_epoch: int, batches: int, max_steps: int) -> None:
    """How much there is to do after `step`, where steps were of another size before: `more_steps`, or `epochs`. An
    epoch has so many steps, and batches; `max_steps` are those of all epochs, or what the script says."""
    if not place["changed"]:
        return  # as it was saved
    left = steps(trainer, place["length"] or batches) - steps(trainer, place["position"]["consumed"])
    if trainer.args.max_steps > 0:
        place["epochs"] = place["epoch"] + 1 + math.ceil(max(max_steps - step - left, 0) / in_epoch)
    else:
        place["more_steps"] = max(step + left - (place["epoch"] + 1) * in_epoch, step - max_steps)


def steps(trainer: Any, batches: int) -> int:
    """That so many batches make."""
    return math.ceil(batches / int(trainer.args.gradient_accumulation_steps))
