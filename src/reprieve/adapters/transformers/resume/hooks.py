"""Resumes a training: chooses the checkpoint, has the trainer load it strictly, and re-enters the interrupted epoch.

    restore_checkpoint ─► compute_training_values ─► _load_… ─► _init_training_state ─► restore_trainer ─► run_due_work
    which checkpoint      position in the data       strictly   epoch and batch         in the interrupted `_run_epoch`

The trainer loads a checkpoint with its own code. `training.py` calls the last two when the trainer re-enters the
interrupted epoch: what the control flags of the checkpoint say was still due comes first.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from reprieve.adapters.transformers import preflight
from reprieve.adapters.transformers.patching import call_arguments
from reprieve.adapters.transformers.resume import resume_position, strict_loading, trainer_snapshot
from reprieve.adapters.transformers.resume.resumable_dataloader import ResumableDataLoader
from reprieve.adapters.transformers.resume.resume_position import ResumePosition
from reprieve.adapters.transformers.trainer_state import TrainerState
from reprieve.rng import capture_rng, restore_rng
from reprieve.session.session import Session

log = logging.getLogger("reprieve")


class TrainerResume:
    """The resume of one training: which checkpoint it starts from, and how far the re-entry is."""

    def __init__(self, trainer: Any, session: Session) -> None:
        self._trainer = trainer
        self._session = session
        self.path: str | None = None
        """The checkpoint to load."""
        self.script_checkpoint: str | None = None
        """The path that the script passed to `train`."""
        self.saved: TrainerState | None = None
        """What Reprieve saved with the checkpoint; None: there is no checkpoint, or another tool wrote it."""
        self._restored_step = 0
        self.requested_step: int | None = None
        """The restored step, if the script's save strategy requested its checkpoint."""
        self.is_pending = False
        """There is an interrupted epoch, and the loop has not re-entered it yet."""
        self._position: ResumePosition | None = None
        self.evaluation_is_due = False
        """The checkpoint was saved before the evaluation of its step, which has not run since."""
        self._loading_path = ""

    def restore_checkpoint(self, resume_from_checkpoint: Any) -> None:
        """Restore the newest valid checkpoint. `resume_from_checkpoint`: what the script passed to `train`."""
        session = self._session
        restored = session.checkpointer.restore(verify_all_files=True, required_file="trainer_state.json")
        if restored is not None:
            self._restored_step = restored.step
            if (values := restored.values.get("transformers")) is not None:
                self.saved = TrainerState.from_state(values)
                self.is_pending = True
            else:
                log.warning("%s was not saved by Reprieve: resuming from it as stock transformers does", restored.path)
            if self.saved is None or self.saved.save_requested:
                self.requested_step = restored.step
        self.script_checkpoint = preflight.path_in(resume_from_checkpoint)
        self.path = preflight.choose_checkpoint(session, restored, self.saved, self.script_checkpoint)
        session.restored(restored)

    @property
    def position(self) -> ResumePosition:
        """Where the training continues. Known once the trainer has counted its steps."""
        assert self._position is not None
        return self._position

    @property
    def extra_steps(self) -> int:
        """Steps beyond what the epochs have, because earlier steps had another size."""
        return self._position.extra_steps if self._position is not None else 0

    def hooks(self) -> dict[str, Callable[..., Any]]:
        """The replacements of the trainer's methods that load a checkpoint."""
        return {
            "_init_training_state": self._init_training_state,
            "_load_from_checkpoint": self._load_from_checkpoint,
            "_load_best_model": self._load_best_model,
            "_load_optimizer_and_scheduler": self._load_optimizer_and_scheduler,
            "_issue_warnings_after_load": self._check_loaded,
            "_load_callback_state": lambda original: strict_loading.restore_callbacks(self._trainer),
            "_load_rng_state": self._load_rng_state,
        }

    # Loading, with the trainer's own code

    def _load_from_checkpoint(self, original: Callable[..., None], path: str, *args: Any, **kwargs: Any) -> None:
        self._loading_path = path
        model = call_arguments(original, (path, *args), kwargs).get("model") or self._trainer.model
        with (
            strict_loading.mismatch_explained(path),
            strict_loading.strict_adapters(model, path),
            strict_loading.all_adapters_loaded(model, path),
        ):
            original(path, *args, **kwargs)

    def _load_best_model(self, original: Callable[..., None]) -> None:
        path = self._loading_path = self._trainer.state.best_model_checkpoint
        with strict_loading.mismatch_explained(path), strict_loading.strict_adapters(self._trainer.model, path):
            original()

    def _load_optimizer_and_scheduler(self, original: Callable[..., None], path: str | None) -> None:
        with strict_loading.mismatch_explained(path or "the checkpoint"):
            original(path)

    def _check_loaded(self, original: Callable[..., None], result: Any) -> None:
        strict_loading.complete_weights(self._trainer.model, result, self._loading_path)

    def _load_rng_state(self, original: Callable[..., None], path: str | None) -> None:
        if self.saved is None:  # otherwise `restore_trainer` does it, at the right point of the loop
            original(path)

    # The position

    def compute_training_values(
        self, original: Callable[..., tuple[Any, ...]], loader: ResumableDataLoader, *args: Any, **kwargs: Any
    ) -> tuple[Any, ...]:
        """Compute how much there is to train, in place of `set_initial_training_values`.

        Completed steps of another size count as the samples that they were. A trainer that retries with a smaller batch
        (auto_find_batch_size) calls this again, and loads the checkpoint again.
        """
        epochs, steps_in_epoch, *rest, batches_in_epoch, max_steps = original(*args, **kwargs)
        if self.saved is not None:
            self._position = resume_position.count_remaining_steps(
                resume_position.find_position(
                    self.saved,
                    self._trainer,
                    loader,
                    batches_in_epoch,
                    more_steps=self.saved.max_steps <= self._restored_step < max_steps,
                ),
                self._trainer,
                step=self._restored_step,
                steps_in_epoch=steps_in_epoch,
                batches_in_epoch=batches_in_epoch,
                max_steps=max_steps,
            )
            self.is_pending = True
            if self._trainer.args.max_steps > 0:
                epochs = max(epochs, self._position.min_epochs)
            else:
                max_steps += self._position.extra_steps
        return (epochs, steps_in_epoch, *rest, batches_in_epoch, max_steps)

    def _init_training_state(
        self, original: Callable[..., tuple[int, int]], *args: Any, **kwargs: Any
    ) -> tuple[int, int]:
        """Return the epoch and the batch at which the loop continues."""
        epoch_and_batch = original(*args, **kwargs)
        trainer = self._trainer
        self._session.checkpointer.pin(preflight.step_of(trainer.state.best_model_checkpoint))
        max_steps = call_arguments(original, args, kwargs)["max_steps"]
        if self.saved is not None:
            trainer_snapshot.reorder_log(trainer.state.log_history, self.saved.log_key_orders)
        # How often to log and save follows the script's present arguments, not the checkpoint's.
        trainer.state.compute_steps(trainer.args, max_steps)
        if not self.is_pending:
            return epoch_and_batch
        preflight.check_length(trainer.state, max_steps)
        return self.position.epoch, self.position.data_position.consumed

    # Re-entering the interrupted epoch

    def restore_trainer(self, loader: ResumableDataLoader) -> None:
        """Put the trainer back into the state of the checkpoint: from here on, the interrupted epoch continues."""
        assert self.saved is not None
        self.is_pending = False
        trainer_snapshot.restore(self._trainer, self.saved.snapshot)
        loader.resume_at(self.position.data_position.to_state())
        self._session.restored_all()
        control, state = self._trainer.control, self._trainer.state
        if state.global_step >= self.saved.max_steps:
            control.should_training_stop = state.global_step >= state.max_steps
        if self._session.finished and control.should_training_stop:
            log.warning("already finished after %d steps: nothing to train", state.global_step)
        self.evaluation_is_due = control.should_evaluate

    def run_due_work(self, epoch_arguments: dict[str, Any]) -> None:
        """Evaluate and save, if that was due at the restored step. `epoch_arguments`: those of `_run_epoch`."""
        trainer = self._trainer
        if trainer.control.should_evaluate or trainer.control.should_save:
            names = ("model", "trial", "epoch", "ignore_keys_for_eval", "start_time")
            passed = {name: epoch_arguments[name] for name in names}
            trainer._maybe_log_save_evaluate(trainer._tr_loss, None, **passed, learning_rate=None)

    def rest_of_epoch(self, loader: ResumableDataLoader, epoch_arguments: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of `_run_epoch` with which it trains the rest of the interrupted epoch."""
        trainer, position = self._trainer, self.position
        arguments = dict(epoch_arguments)
        if (batches := position.epoch_batches) is not None:
            arguments["steps_in_epoch"] = batches
            arguments["num_update_steps_per_epoch"] = resume_position.steps_of(trainer, batches)
        rng = capture_rng({})
        loader.resume_at(position.data_position.to_state(), lambda: restore_rng(rng, {}))
        if trainer.control.should_epoch_stop or trainer.control.should_training_stop:
            # No batch remains, but the end of the epoch does.
            batches_done = arguments["steps_trained_in_current_epoch"]
            arguments["num_update_steps_per_epoch"] = batches_done // trainer.args.gradient_accumulation_steps
        return arguments
