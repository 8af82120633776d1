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

from reprieve.adapters.transformers import deepspeed
from reprieve.checkpoint.buffers.block_pool import BlockPool
from reprieve.checkpoint.folder import paths
from reprieve.checkpoint.folder.catalog import list_checkpoints
from reprieve.checkpoint.folder.verify import verify
from reprieve.checkpoint.results import Restored
from reprieve.errors import ConfigError, InvalidCheckpoint, StateMismatch
from reprieve.progress.sinks.terminal_bar import terminal
from reprieve.ranks.group import Ranks
from reprieve.session.session import Session
from reprieve.settings import ALL, NEVER, Settings, resolve
from reprieve.storage.uri import original_path
from reprieve.units import format_size

log = logging.getLogger("reprieve")

_SETTINGS = ("checkpoints", "every", "keep", "fresh", "name", "kill_wait", "save_at_end")


def check(trainer: Any) -> None:
    """Raise for what cannot be resumed from."""
    started = os.environ.get("WORLD_SIZE", "1")
    if started not in ("1", str(trainer.args.world_size)):
        raise ConfigError(
            f"{started} processes were started, and the Trainer in each of them has a world_size of "
            f"{trainer.args.world_size}: they would overwrite each other's checkpoints. Without GPUs, give use_cpu=True"
        )
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
    session's.

    Without `save_total_limit`, stock keeps every checkpoint that `save_strategy` asks for. So do we where `every` adds
    checkpoints of our own: `keep` then limits only those.
    """
    args: TrainingArguments = trainer.args
    found = resolve({name: options.get(name) for name in _SETTINGS}, options=False)
    said = {name: source != "default" for name, source in found.sources.items()}
    every = found.every if said["every"] else NEVER
    keep_requested = every != NEVER and not args.save_total_limit
    folder = Path(found.checkpoints or str(args.output_dir))
    changed = replace(
        found,
        # The checkpoints of a second training have the same names as those of the first.
        checkpoints=os.fspath(folder if call == 1 else folder / f"train-{call}"),
        every=every,
        keep=found.keep if said["keep"] or keep_requested else args.save_total_limit or ALL,
    )
    rest = {name: value for name, value in options.items() if name not in _SETTINGS}
    return changed, {"keep_requested": keep_requested, **rest}


def path_in(resume_from_checkpoint: Any) -> str | None:
    """The path that the script gave to `train`; None if it gave none, which means the same as True and False here:
    resuming is automatic. Scripts with argparse pass these, and empty variables, as text."""
    if not isinstance(resume_from_checkpoint, (str, os.PathLike)):
        return None
    path = os.fspath(resume_from_checkpoint)
    is_word = path.strip().lower() in ("", "true", "false", "none")
    return None if is_word and not Path(path or "no path").exists() else path


def point(session: Session, restored: Restored | None, asked: str | None) -> str | None:
    """Where training goes on. `asked`: the path that the script gave to `train`, which is where the run begins."""
    given, root = _outside_drill(asked), original_path(session.root)
    if restored is None:
        if asked is None or given is None:
            return None
        if session.settings.fresh and given.parent == root:
            log.warning("starting over: not from %s, which was moved away", asked)
            return None
        _check_starting_point(session.ranks, Path(asked).absolute())
        return asked
    ours = restored.values.get("transformers")
    began = _outside_drill(ours["given"] or None) if ours else None
    if given is None or given == original_path(restored.path):
        return os.fspath(restored.path)
    if asked is not None and given != began and given.parent != root:
        _check_starting_point(session.ranks, Path(asked).absolute())
        raise StateMismatch(
            f"the script begins at {asked}, and {root} holds checkpoints of a run that did not: give another "
            "output_dir, or start over (reprieve run --fresh)"
        )
    log.warning("the run began at %s, and goes on from %s", asked, restored.path)
    return os.fspath(restored.path)


def _outside_drill(given: str | None) -> Path | None:
    """A checkpoint's path, as it is outside of a drill: in one, a script may have looked into the scratch folder."""
    return original_path(given) if given is not None else None


def _check_starting_point(ranks: Ranks, path: Path) -> None:
    """Raise, on all ranks, unless a trainer can resume from there on each of them."""
    problem = next((problem for problem in ranks.agree("starting point", lambda: _problem(path)) if problem), None)
    if problem is None:
        return
    newest = _newest_near(path)
    instead = f"Give {newest}, the newest checkpoint there, or leave" if newest else "Leave"
    raise ConfigError(
        f"resume_from_checkpoint={os.fspath(path)!r} cannot be resumed from: {problem}. {instead} it out: Reprieve "
        "resumes from the newest checkpoint in output_dir by itself, and starts from scratch where there is none"
    )


def _problem(path: Path) -> str | None:
    """Why a trainer cannot resume from there."""
    if not path.is_dir():
        return "it is not a folder" if path.exists() else "there is no such folder"
    if not any(path.iterdir()):
        return "the folder is empty"
    if not (path / "trainer_state.json").is_file():
        return "it is no checkpoint of a Trainer, because it has no trainer_state.json"
    try:
        verify(path, BlockPool(limit=2))
    except InvalidCheckpoint as error:
        return error.reason
    return None


def _newest_near(path: Path) -> Path | None:
    """The newest checkpoint in that folder, or beside it."""
    for folder in (path, path.parent):
        with contextlib.suppress(OSError):
            for found in list_checkpoints(folder):
                if found.problem is None and found.path != path:
                    return found.path
    return None


def step_of(checkpoint: str | None) -> int | None:
    """Of a checkpoint's folder."""
    return paths.step_of(Path(checkpoint)) if checkpoint else None


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
