"""Before the first step: what a trainer's arguments mean to us, what stands in the way, and where a run goes on."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import TrainingArguments
from transformers.trainer_callback import PrinterCallback, ProgressCallback
from transformers.trainer_utils import has_length

from reprieve.checkpoint import names
from reprieve.checkpoint.answers import Restored
from reprieve.checkpoint.blocks import BlockPool
from reprieve.checkpoint.verify import verify
from reprieve.config import format_size
from reprieve.errors import ConfigError, StateMismatch
from reprieve.frameworks.session import Session
from reprieve.frameworks.transformers.seeking import Seeking
from reprieve.progress.bar import terminal
from reprieve.settings import ALL, NEVER, Settings, resolve

log = logging.getLogger("reprieve")

_SETTINGS = ("checkpoints", "every", "keep", "fresh", "name", "kill_wait", "save_at_end")


def check(trainer: Any) -> None:
    """Raise for what cannot be resumed from."""
    if trainer.args.save_only_model:
        raise ConfigError(
            "save_only_model=True: such a checkpoint has no optimizer, and training cannot go on from it. Take it out "
            "of TrainingArguments; save_model() saves the model alone"
        )
    if trainer.is_deepspeed_enabled:
        raise ConfigError(
            "DeepSpeed writes its checkpoints itself, and not as a whole: Reprieve cannot make them safe. Use FSDP2 "
            "(TrainingArguments(fsdp=…)), or run without Reprieve"
        )
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    gathers = trainer.is_fsdp_enabled and "FULL" in str(getattr(plugin, "state_dict_type", ""))
    if gathers and _speaks(trainer):
        weights = sum(one.nbytes for one in trainer.model.parameters())
        log.warning(
            "FSDP with FULL_STATE_DICT gathers the whole model (%s) and its optimizer (with AdamW twice that) in the "
            "memory of rank 0 for every checkpoint, and rank 0 alone writes it: SHARDED_STATE_DICT does without",
            format_size(weights),
        )


def settings(trainer: Any, options: Mapping[str, Any], call: int) -> tuple[Settings, dict[str, Any]]:
    """What was said to us wins over TrainingArguments, which win over our defaults. The rest of the options are the
    session's."""
    args: TrainingArguments = trainer.args
    found = resolve({name: options.get(name) for name in _SETTINGS}, options=False)
    said = {name: source != "default" for name, source in found.sources.items()}
    folder = Path(found.checkpoints or str(args.output_dir))
    changed = replace(
        found,
        # The checkpoints of a second training have the same names as those of the first.
        checkpoints=os.fspath(folder if call == 1 else folder / f"train-{call}"),
        every=found.every if said["every"] else NEVER,
        keep=found.keep if said["keep"] else args.save_total_limit or ALL,
    )
    return changed, {name: value for name, value in options.items() if name not in _SETTINGS}


def point(session: Session, restored: Restored | None, asked: Any) -> str | None:
    """Where training goes on. `asked`: what the script gave to `train`, which is where the run begins."""
    given = Path(asked).absolute() if isinstance(asked, (str, os.PathLike)) else None
    if restored is None:
        if given is None:
            return None  # True, where nothing was saved yet, is no error
        if session.settings.fresh and given.parent == session.root.absolute():
            log.warning("starting over: not from %s, which was moved away", asked)
            return None
        verify(given, BlockPool(limit=2))
        return str(asked)
    ours = restored.values.get("transformers")
    began = Path(ours["given"]).absolute() if ours and ours["given"] else None
    if given is None or given == restored.path.absolute():
        return os.fspath(restored.path)
    if given != began and given.parent != session.root.absolute():
        raise StateMismatch(
            f"the script begins at {asked}, and {session.root} holds checkpoints of a run that did not: give another "
            "output_dir, or start over (reprieve run --fresh)"
        )
    log.warning("the run began at %s, and goes on from %s", asked, restored.path)
    return os.fspath(restored.path)


def place(saved: Mapping[str, Any], trainer: Any, loader: Seeking, batches: int) -> dict[str, Any]:
    """Where the loop was, in the batches of this process: they may be others now, of other ranks (`changed`). `length`:
    of the epoch that was interrupted, if that is not as many `batches` as the others have."""
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


def _dealt_again(saved: Mapping[str, Any], trainer: Any, loader: Seeking) -> dict[str, Any]:
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
        saved["world_size"], saved["accumulation"], saved["batch_size"], ranks, count, size, done, but,
    )  # fmt: skip
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


def step_of(checkpoint: str | None) -> int | None:
    """Of a checkpoint's folder."""
    return names.step_of(Path(checkpoint)) if checkpoint else None


def check_length(state: Any, max_steps: int) -> None:
    if state.global_step > max_steps:
        raise StateMismatch(
            f"the checkpoint is of step {state.global_step}, and there are {max_steps} steps to train: ask for more "
            "(max_steps, num_train_epochs), or start over (reprieve run --fresh)"
        )


@contextlib.contextmanager
def data_sought(trainer: Any) -> Iterator[None]:
    """`ignore_data_skip` is for those who do not want to wait until data is skipped. Nobody has to."""
    args = trainer.args
    asked, args.ignore_data_skip = args.ignore_data_skip, False
    try:
        yield
    finally:
        args.ignore_data_skip = asked


def replaces_bar(trainer: Any) -> bool:
    """Ours instead of transformers' (tqdm), where one can be drawn: it also shows what is saved."""
    return terminal() is not None and not trainer.args.disable_tqdm


@contextlib.contextmanager
def bar_replaced(trainer: Any) -> Iterator[None]:
    """While inside, transformers draws none, and prints what it logs as it does without one."""
    theirs = trainer.pop_callback(ProgressCallback) if replaces_bar(trainer) else None
    if theirs is None:
        yield
        return
    trainer.add_callback(PrinterCallback)
    try:
        yield
    finally:
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(theirs)


def remove_rivals(trainer: Any) -> None:
    """Transformers' own just-in-time checkpoints would save as well, and go on training."""
    for one in list(trainer.callback_handler.callbacks):
        if type(one).__name__ == "KubeflowCallback":
            trainer.remove_callback(one)  # says 100 % after a stop; we tell the same server
        elif type(one).__name__ == "JITCheckpointCallback":
            if _speaks(trainer):
                log.warning("enable_jit_checkpoint=True: Reprieve does that now, and transformers' own does not")
            trainer.remove_callback(one)
            before = getattr(one.jit_manager, "_original_sigterm_handler", None)
            if before is not None and threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, before)


def _speaks(trainer: Any) -> bool:
    """Is it the rank that speaks for all?"""
    return bool(trainer.args.process_index == 0)
