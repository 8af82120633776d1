"""Checks and decisions before the first step of a training.

They refuse arguments that no run can resume with, translate TrainingArguments into Settings, choose the checkpoint to
resume from, and remove callbacks that would do the same as Reprieve. `protection.py` and `resume/hooks.py` call them.
"""

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
from reprieve.adapters.transformers.trainer_state import TrainerState
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
from reprieve.submitted_arguments import SubmittedArguments
from reprieve.units import format_size

log = logging.getLogger("reprieve")

_SETTINGS = ("checkpoints", "every", "keep", "fresh", "name", "kill_wait", "save_at_end")


def check(trainer: Any) -> None:
    """Raise ConfigError for arguments that no run can resume with; warn about expensive checkpoints."""
    processes = os.environ.get("WORLD_SIZE", "1")
    if processes not in ("1", str(trainer.args.world_size)):
        raise ConfigError(
            f"{processes} processes were started, but the Trainer in each of them has a world_size of "
            f"{trainer.args.world_size}: they would overwrite each other's checkpoints. Without GPUs, set use_cpu=True"
        )
    if trainer.args.save_only_model:
        raise ConfigError(
            "save_only_model=True: such a checkpoint has no optimizer, and no training can resume from it. Remove it "
            "from TrainingArguments; save_model() saves the model alone"
        )
    if trainer.is_deepspeed_enabled:
        deepspeed.check(trainer)
        warning = deepspeed.gathering_warning(trainer)
    else:
        warning = _gathering_warning(trainer)
    if warning and _is_rank_zero(trainer):
        log.warning("%s", warning)


def _gathering_warning(trainer: Any) -> str | None:
    """Return a warning if FSDP gathers the whole model for every checkpoint."""
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    if not trainer.is_fsdp_enabled or "FULL" not in str(getattr(plugin, "state_dict_type", "")):
        return None
    weights = sum(parameter.nbytes for parameter in trainer.model.parameters())
    return (
        f"FSDP with FULL_STATE_DICT gathers the whole model ({format_size(weights)}) and its optimizer (with AdamW "
        "twice that) in the memory of rank 0 for every checkpoint, and rank 0 alone writes it: use "
        "SHARDED_STATE_DICT"
    )


def resolve_settings(trainer: Any, options: Mapping[str, Any], call: int) -> tuple[Settings, dict[str, Any]]:
    """Return the settings of the `call`-th training, and the options that are the session's.

    Options and the environment win over TrainingArguments, which win over Reprieve's defaults. Without
    `save_total_limit`, stock keeps every checkpoint that `save_strategy` requests. So does Reprieve where `every` adds
    checkpoints: `keep` then limits only the added ones.

    A submitter who leaves `save_total_limit` to the script has a `keep` in the environment all the same, because
    `spec.checkpointing` always has one: there it is the default.
    """
    args: TrainingArguments = trainer.args
    found = resolve({name: options.get(name) for name in _SETTINGS}, options=False)
    is_set = {name: source != "default" for name, source in found.sources.items()}
    every = found.every if is_set["every"] else NEVER
    submitted = SubmittedArguments.from_environment()
    leaves_limit = submitted is not None and submitted.save_total_limit is None and options.get("keep") is None
    is_set["keep"] &= not (leaves_limit and args.save_total_limit)
    keep_requested = every != NEVER and not args.save_total_limit
    folder = Path(found.checkpoints or str(args.output_dir))
    settings = replace(
        found,
        # The checkpoints of a second training have the same names as those of the first.
        checkpoints=os.fspath(folder if call == 1 else folder / f"train-{call}"),
        every=every,
        keep=found.keep if is_set["keep"] or keep_requested else args.save_total_limit or ALL,
    )
    session_options = {name: value for name, value in options.items() if name not in _SETTINGS}
    return settings, {"keep_requested": keep_requested, **session_options}


def path_in(resume_from_checkpoint: Any) -> str | None:
    """Return the path that the script passed to `train`, or None if it passed none.

    True and False mean None here, because resuming is automatic. Scripts with argparse pass these, and empty
    variables, as text.
    """
    if not isinstance(resume_from_checkpoint, (str, os.PathLike)):
        return None
    path = os.fspath(resume_from_checkpoint)
    is_word = path.strip().lower() in ("", "true", "false", "none")
    return None if is_word and not Path(path or "no path").exists() else path


def choose_checkpoint(
    session: Session, restored: Restored | None, saved: TrainerState | None, script_checkpoint: str | None
) -> str | None:
    """Return the checkpoint that the trainer loads; None: start from scratch.

    `script_checkpoint`, the path that the script passed to `train`, is where a run starts. Once the run has checkpoints
    of its own, it resumes from the newest of these: `restored`, with `saved` in it.
    """
    drill = session.settings.drill
    start, root = _outside_drill(script_checkpoint, drill), original_path(session.root, drill)
    if restored is None:
        if script_checkpoint is None or start is None:
            return None
        if session.settings.fresh and start.parent == root:
            log.warning("starting over: %s was moved away and is not used", script_checkpoint)
            return None
        _check_starting_point(session.ranks, Path(script_checkpoint).absolute())
        return script_checkpoint
    earlier_start = _outside_drill(saved.script_checkpoint or None, drill) if saved is not None else None
    if start is None or start == original_path(restored.path, drill):
        return os.fspath(restored.path)
    if script_checkpoint is not None and start != earlier_start and start.parent != root:
        _check_starting_point(session.ranks, Path(script_checkpoint).absolute())
        raise StateMismatch(
            f"the script starts from {script_checkpoint}, but {root} holds checkpoints of a run that did not: choose "
            "another output_dir, or start over (reprieve run --fresh)"
        )
    log.warning("the run started from %s and resumes from %s", script_checkpoint, restored.path)
    return os.fspath(restored.path)


def _outside_drill(path: str | None, drill: str | None) -> Path | None:
    """Return the path outside of a drill: in a drill, a script may have found it in the scratch folder."""
    return original_path(path, drill) if path is not None else None


def _check_starting_point(ranks: Ranks, path: Path) -> None:
    """Raise ConfigError on all ranks unless a trainer can resume from `path` on each of them."""
    problem = next((problem for problem in ranks.agree("starting point", lambda: _problem(path)) if problem), None)
    if problem is None:
        return
    newest = _newest_near(path)
    instead = f"Pass {newest}, the newest checkpoint there, or leave" if newest else "Leave"
    raise ConfigError(
        f"resume_from_checkpoint={os.fspath(path)!r} cannot be resumed from: {problem}. {instead} it out: Reprieve "
        "resumes from the newest checkpoint in output_dir automatically, and starts from scratch if there is none"
    )


def _problem(path: Path) -> str | None:
    """Return why a trainer cannot resume from `path`, or None if it can."""
    if not path.is_dir():
        return "it is not a folder" if path.exists() else "there is no such folder"
    if not any(path.iterdir()):
        return "the folder is empty"
    if not (path / "trainer_state.json").is_file():
        return "it is not a checkpoint of a Trainer: it has no trainer_state.json"
    try:
        verify(path, BlockPool(limit=2))
    except InvalidCheckpoint as error:
        return error.reason
    return None


def _newest_near(path: Path) -> Path | None:
    """Return the newest valid checkpoint in that folder or beside it."""
    for folder in (path, path.parent):
        with contextlib.suppress(OSError):
            for found in list_checkpoints(folder):
                if found.problem is None and found.path != path:
                    return found.path
    return None


def step_of(checkpoint: str | None) -> int | None:
    """Return the step in the name of a checkpoint's folder."""
    return paths.step_of(Path(checkpoint)) if checkpoint else None


def check_length(state: Any, max_steps: int) -> None:
    """Raise StateMismatch if the checkpoint has more steps than there are to train."""
    if state.global_step > max_steps:
        raise StateMismatch(
            f"the checkpoint is of step {state.global_step}, but there are only {max_steps} steps to train: request "
            "more (max_steps, num_train_epochs), or start over (reprieve run --fresh)"
        )


def replaces_bar(trainer: Any) -> bool:
    """Whether Reprieve's progress bar replaces tqdm's. It needs a terminal, and also shows saves."""
    return terminal() is not None and not trainer.args.disable_tqdm


@contextlib.contextmanager
def bar_replaced(trainer: Any) -> Iterator[None]:
    """Keep transformers from drawing its progress bar; it prints its log lines as it does with disable_tqdm."""
    progress_callback = trainer.pop_callback(ProgressCallback) if replaces_bar(trainer) else None
    if progress_callback is None:
        yield
        return
    trainer.add_callback(PrinterCallback)
    try:
        yield
    finally:
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(progress_callback)


def remove_conflicting_callbacks(trainer: Any) -> None:
    """Remove callbacks that would save a second time, or report what Reprieve reports."""
    for callback in list(trainer.callback_handler.callbacks):
        if type(callback).__name__ == "KubeflowCallback":
            trainer.remove_callback(callback)  # it reports 100 % after a stop; Reprieve reports to the same server
        elif type(callback).__name__ == "RayTrainReportCallback":
            if _is_rank_zero(trainer):
                log.warning(
                    "RayTrainReportCallback is removed: it would copy every checkpoint once more. Reprieve saves and "
                    "reports in its place"
                )
            trainer.remove_callback(callback)
        elif type(callback).__name__ == "JITCheckpointCallback":
            if _is_rank_zero(trainer):
                log.warning("enable_jit_checkpoint=True: Reprieve replaces transformers' just-in-time checkpoints")
            trainer.remove_callback(callback)
            before = getattr(callback.jit_manager, "_original_sigterm_handler", None)
            if before is not None and threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, before)


def _is_rank_zero(trainer: Any) -> bool:
    """Whether this rank logs what concerns all ranks."""
    return bool(trainer.args.process_index == 0)
