"""What goes into a checkpoint of a trainer: whatever Hugging Face would write, caught on its way (`collecting.py`)."""

from __future__ import annotations

import contextlib
import importlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers.trainer_callback import TrainerCallback

from reprieve.adapters.transformers import deepspeed
from reprieve.adapters.transformers.patching import replaced
from reprieve.adapters.transformers.save.hub_push import HubPusher
from reprieve.adapters.transformers.save.interception import SaveInterceptor
from reprieve.checkpoint.folder import paths
from reprieve.checkpoint.format.layout import FileLayout
from reprieve.errors import RankFailed, RanksError
from reprieve.session.session import Session

_LOOKS_IF: dict[str, Callable[[Any], bool]] = {
    "WandbCallback": lambda one: getattr(one._log_model, "value", None) == "checkpoint",
    "TrackioCallback": lambda one: False,
    "MLflowCallback": lambda one: bool(one._log_artifacts),
    "NeptuneCallback": lambda one: bool(one._should_upload_checkpoint),
    "ClearMLCallback": lambda one: bool(one._log_model),
    "FlyteCallback": lambda one: bool(one.sync_checkpoints),
    "DVCLiveCallback": lambda one: one._log_model == "all",
    "SwanLabCallback": lambda one: False,
}
"""Callbacks of transformers that have `on_save`: when they do read the checkpoint there."""


class CheckpointContents:
    """Of the checkpoints of one trainer."""

    def __init__(self, trainer: Any, save_checkpoint: Callable[..., None], pushing: HubPusher) -> None:
        """`save_checkpoint`: the trainer's own."""
        self._trainer = trainer
        self._save_checkpoint = save_checkpoint
        self._pushing = pushing
        self.asked_at: int | None = None
        """The last step that Hugging Face wanted to be saved."""
        if trainer.is_fsdp_enabled:
            # Accelerate may import it only when it saves: its writer could not be replaced before.
            importlib.import_module("torch.distributed.checkpoint")

    def collect(self, session: Session) -> list[FileLayout]:
        """What its own code saves now, of this rank.

        There are collectives in it (a sum over all ranks, DCP's plans). So nobody begins before all can write, and
        storage that fails one rank meanwhile fails the save only once all are through: then training may go on.
        """
        step, ranks = self._trainer.state.global_step, session.ranks
        scratch = paths.collecting(session.root, step, session.checkpointer.attempt, ranks.rank)
        folder = paths.checkpoint(scratch, step)
        found: list[FileLayout] = []
        failed: OSError | None = None

        def make() -> None:
            shutil.rmtree(scratch, ignore_errors=True)
            # Also where this rank saves nothing: it looks whether the best checkpoint is there.
            folder.mkdir(parents=True)

        def save() -> str | None:
            nonlocal failed
            try:
                found.extend(self._files(session, scratch, folder))
            except OSError as error:
                failed = error
            return None if failed is None else str(failed)

        try:
            ranks.agree("scratch", make)
            reasons = ranks.agree("collect", save)
        except RankFailed as error:
            if failed is None:
                raise
            raise RanksError(f"{failed}. The other ranks stand still in the save, and training cannot go on") from error
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        if failed is not None:
            raise failed
        for rank, reason in enumerate(reasons):
            if reason is not None:
                raise RankFailed(rank, reason, during="collect")
        return found

    def _files(self, session: Session, scratch: Path, folder: Path) -> list[FileLayout]:
        state = self._trainer.state
        before = state.best_model_checkpoint
        with self._output_to(scratch), self._pushing.held(), SaveInterceptor(folder) as collecting:
            self._save_checkpoint(self._trainer.model_wrapped, None)
        noted, state.best_model_checkpoint = state.best_model_checkpoint, before
        self.note_best(session.root)
        if state.best_model_checkpoint != noted and (folder / "trainer_state.json").exists():
            state.save_to_json(str(folder / "trainer_state.json"))
        return collecting.files()

    def note_best(self, root: Path) -> None:
        """If this step is the best one, its checkpoint is, where it will be. A stop, or a schedule of ours, may save
        a step that Hugging Face would not have saved: the best checkpoint of an undisturbed run is none of those."""
        state = self._trainer.state
        if state.best_global_step == state.global_step == self.asked_at:
            state.best_model_checkpoint = str(paths.checkpoint(root, state.global_step))

    def size(self, rank: int) -> int:
        """About how many bytes this rank will write. The optimizer has its state."""
        trainer = self._trainer
        if trainer.is_deepspeed_enabled:
            return deepspeed.size(trainer.model_wrapped, rank)
        if rank != 0 and not trainer.is_fsdp_enabled:
            return 0
        model = trainer.model
        weights = [one for one in model.parameters() if one.requires_grad or not hasattr(model, "peft_config")]
        states = (one for state in trainer.optimizer.state.values() for one in state.values())
        tensors = [getattr(one, "_local_tensor", one) for one in (*weights, *states) if isinstance(one, torch.Tensor)]
        return int(sum(one.nbytes for one in tensors) * 1.01)

    def metrics(self) -> dict[str, float]:
        """What was logged at this step."""
        state = self._trainer.state
        found: dict[str, float] = {}
        for entry in reversed(state.log_history):
            if entry.get("step") != state.global_step:
                break
            found |= {name: float(value) for name, value in entry.items() if isinstance(value, (int, float))}
        found.pop("step", None)
        return found

    def somebody_looks(self) -> bool:
        """Does anybody read the checkpoint as soon as it is saved?"""
        return any(
            _LOOKS_IF.get(type(one).__name__, lambda _: True)(one)
            for one in self._trainer.callback_handler.callbacks
            if type(one).on_save is not TrainerCallback.on_save
        )

    @contextlib.contextmanager
    def nowhere(self) -> Iterator[None]:
        """While inside, the trainer finds no checkpoints to remove."""
        with self._output_to(Path(self._trainer.args.output_dir) / ".none"):
            yield

    @contextlib.contextmanager
    def _output_to(self, folder: Path) -> Iterator[None]:
        with replaced(self._trainer, "_get_output_dir", lambda *args, **kwargs: str(folder)):
            yield
