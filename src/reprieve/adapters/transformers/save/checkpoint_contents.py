"""Collects what goes into a checkpoint of a trainer: whatever Hugging Face's own code writes for this step.

`training.py` passes `CheckpointContents.collect` to the engine, which calls it during a save. `interception.py` keeps
the large files off the disk.
"""

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
from reprieve.adapters.transformers.patching import patched
from reprieve.adapters.transformers.save.hub_push import HubPusher
from reprieve.adapters.transformers.save.interception import SaveInterceptor
from reprieve.checkpoint.folder import paths
from reprieve.checkpoint.format.layout import FileLayout
from reprieve.errors import RankFailed, RanksError
from reprieve.session.session import Session

_READS_CHECKPOINT: dict[str, Callable[[Any], bool]] = {
    "WandbCallback": lambda callback: getattr(callback._log_model, "value", None) == "checkpoint",
    "TrackioCallback": lambda callback: False,
    "MLflowCallback": lambda callback: bool(callback._log_artifacts),
    "NeptuneCallback": lambda callback: bool(callback._should_upload_checkpoint),
    "ClearMLCallback": lambda callback: bool(callback._log_model),
    "FlyteCallback": lambda callback: bool(callback.sync_checkpoints),
    "DVCLiveCallback": lambda callback: callback._log_model == "all",
    "SwanLabCallback": lambda callback: False,
}
"""Whether the `on_save` of a callback of transformers reads the checkpoint. Other callbacks may."""


class CheckpointContents:
    """The contents of one trainer's checkpoints."""

    def __init__(self, trainer: Any, save_checkpoint: Callable[..., None], hub_pusher: HubPusher) -> None:
        """`save_checkpoint`: the trainer's own method, which collects the files."""
        self._trainer = trainer
        self._save_checkpoint = save_checkpoint
        self._hub_pusher = hub_pusher
        self.requested_step: int | None = None
        """The last step for which the script's save strategy requested a checkpoint."""
        if trainer.is_fsdp_enabled:
            # Accelerate may import it only when it saves, and then its writer could not be intercepted.
            importlib.import_module("torch.distributed.checkpoint")

    def collect(self, session: Session) -> list[FileLayout]:
        """Return the files that the trainer's own code saves now on this rank.

        That code runs collectives (a sum over all ranks, DCP's plans). So no rank starts before all can write, and a
        storage error on one rank fails the save only once all ranks are through: then training can continue.
        """
        step, ranks = self._trainer.state.global_step, session.ranks
        scratch = paths.collecting(session.root, step, session.checkpointer.attempt, ranks.rank)
        folder = paths.checkpoint(scratch, step)
        found: list[FileLayout] = []
        failed: OSError | None = None

        def make_scratch() -> None:
            shutil.rmtree(scratch, ignore_errors=True)
            # Also where this rank saves nothing: the trainer checks whether the best checkpoint is there.
            folder.mkdir(parents=True)

        def save() -> str | None:
            nonlocal failed
            try:
                found.extend(self._files(session, scratch, folder))
            except OSError as error:
                failed = error
            return None if failed is None else str(failed)

        try:
            ranks.agree("scratch", make_scratch)
            reasons = ranks.agree("collect", save)
        except RankFailed as error:
            if failed is None:
                raise
            raise RanksError(f"{failed}. The other ranks are stuck in the save: training cannot continue") from error
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
        with self._output_to(scratch), self._hub_pusher.suspended(), SaveInterceptor(folder) as interceptor:
            self._save_checkpoint(self._trainer.model_wrapped, None)
        written, state.best_model_checkpoint = state.best_model_checkpoint, before
        self.update_best_checkpoint(session.root)
        if state.best_model_checkpoint != written and (folder / "trainer_state.json").exists():
            state.save_to_json(str(folder / "trainer_state.json"))
        return interceptor.files()

    def update_best_checkpoint(self, root: Path) -> None:
        """Make this step's checkpoint the best one, if its metrics are.

        Only steps that the save strategy requested count: a stop or `every` may save others, which an undisturbed run
        would not have.
        """
        state = self._trainer.state
        if state.best_global_step == state.global_step == self.requested_step:
            state.best_model_checkpoint = str(paths.checkpoint(root, state.global_step))

    def estimated_bytes(self, rank: int) -> int:
        """Estimate how many bytes this rank will write, once the optimizer has its state."""
        trainer = self._trainer
        if trainer.is_deepspeed_enabled:
            return deepspeed.checkpoint_bytes(trainer.model_wrapped, rank)
        if rank != 0 and not trainer.is_fsdp_enabled:
            return 0
        model = trainer.model
        saves_all = not hasattr(model, "peft_config")
        weights = [parameter for parameter in model.parameters() if parameter.requires_grad or saves_all]
        states = (value for state in trainer.optimizer.state.values() for value in state.values())
        tensors = (value for value in (*weights, *states) if isinstance(value, torch.Tensor))
        return int(sum(getattr(tensor, "_local_tensor", tensor).nbytes for tensor in tensors) * 1.01)

    def metrics(self) -> dict[str, float]:
        """Return the numbers that were logged at this step."""
        state = self._trainer.state
        found: dict[str, float] = {}
        for entry in reversed(state.log_history):
            if entry.get("step") != state.global_step:
                break
            found |= {name: float(value) for name, value in entry.items() if isinstance(value, (int, float))}
        found.pop("step", None)
        return found

    def is_read_by_callbacks(self) -> bool:
        """Whether a callback reads the checkpoint as soon as it is saved."""
        return any(
            _READS_CHECKPOINT.get(type(callback).__name__, lambda _: True)(callback)
            for callback in self._trainer.callback_handler.callbacks
            if type(callback).on_save is not TrainerCallback.on_save
        )

    @contextlib.contextmanager
    def checkpoints_hidden(self) -> Iterator[None]:
        """Keep the trainer from finding checkpoints, and so from removing them."""
        with self._output_to(Path(self._trainer.args.output_dir) / ".none"):
            yield

    @contextlib.contextmanager
    def _output_to(self, folder: Path) -> Iterator[None]:
        with patched(self._trainer, "_get_output_dir", lambda *args, **kwargs: str(folder)):
            yield
