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

from reprieve.checkpoint import names
from reprieve.checkpoint.answers import Restored
from reprieve.checkpoint.blocks import BlockPool
from reprieve.checkpoint.verify import verify
from reprieve.config import format_size
from reprieve.errors import ConfigError, StateMismatch
from reprieve.frameworks.session import Session
from reprieve.frameworks.transformers import deepspeed
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
        deepspeed.check(trainer)
        costs = deepspeed.gathering(trainer)
    else:
        costs = _gathering(trainer)
    if costs and _speaks(trainer):
        log.warning("%s", costs)


def _gathering(trainer: Any) -> str | None:
    """What FSDP's checkpoints cost, if they are not saved in shards."""
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    if not trainer.is_fsdp_enabled or "FULL" not in str(getattr(plugin, "state_dict_type", "")):
        return None
    weights = sum(one.nbytes for one in trainer.model.parameters())
    return (
        f"FSDP with FULL_STATE_DICT gathers the whole model ({format_size(weights)}) and its optimizer (with AdamW "
        "twice that) in the memory of rank 0 for every checkpoint, and rank 0 alone writes it: SHARDED_STATE_DICT does "
        "without"
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


def step_of(checkpoint: str | None) -> int | None:
    """Of a checkpoint's folder."""
    return names.step_of(Path(checkpoint)) if checkpoint else None


def check_length(state: Any, max_steps: int) -> None:
    if state.global_step > max_steps:
        raise StateMismatch(
            f"the checkpoint is of step {state.global_step}, and there are {max_steps} steps to train: ask for more "
            "(max_steps, num_train_epochs), or start over (reprieve run --fresh)"
        )


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
