"""Where a training goes on: from which checkpoint, in which epoch, at which batch, and what was due there.

The trainer loads a checkpoint with its own code, told where to enter. It enters the epoch that was interrupted, and
first does what its control's flags say was still due.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from reprieve.adapters.transformers import preflight
from reprieve.adapters.transformers.patching import given
from reprieve.adapters.transformers.resume import resume_position, strict_loading, trainer_snapshot
from reprieve.adapters.transformers.resume.resumable_dataloader import ResumableDataLoader
from reprieve.rng import capture_rng, restore_rng
from reprieve.session.session import Session

log = logging.getLogger("reprieve")


class TrainerResume:
    """Of one training."""

    def __init__(self, trainer: Any, session: Session, real: Mapping[str, Callable[..., Any]], asked: Any) -> None:
        """`real`: the trainer's own methods. `asked`: what the script gave to `train`."""
        self._trainer = trainer
        self._session = session
        self._real = real
        restored = session.checkpointer.restore(verify_all_files=True, required_file="trainer_state.json")
        self.given = preflight.path_in(asked)
        self.path = preflight.point(session, restored, self.given)
        """The checkpoint to load."""
        self._restored = restored
        self._saved = restored.values.get("transformers") if restored is not None else None
        self.place: Mapping[str, Any] | None = self._saved
        """Where the process before was; None: nowhere, or we are there again."""
        requested = restored is not None and (self._saved is None or self._saved.get("requested", True))
        self.requested_at = restored.step if restored is not None and requested else None
        """The step that was restored, if the script's save strategy had asked for that checkpoint."""
        self.evaluation_is_due = False
        """The checkpoint was saved before the evaluation of its step, which was not done since."""
        self.more_steps = 0
        """Than the epochs would have (place.py)."""
        if restored is not None and self._saved is None:
            log.warning("%s was saved by other means: it is resumed as stock transformers does", restored.path)
        session.restored(restored)

    def hooks(self) -> dict[str, Callable[..., Any]]:
        """What is called in place of methods of the trainer."""
        return {
            "_init_training_state": self._init_training_state,
            "_load_from_checkpoint": self._load_from_checkpoint,
            "_load_best_model": self._load_best_model,
            "_load_optimizer_and_scheduler": self._load_optimizer_and_scheduler,
            "_issue_warnings_after_load": self._check_loaded,
            "_load_callback_state": lambda: strict_loading.callbacks(self._trainer),
            "_load_rng_state": self._load_rng_state,
        }

    def _load_from_checkpoint(self, path: str, *args: Any, **kwargs: Any) -> None:
        self._loading = path
        model = given(self._real["_load_from_checkpoint"], (path, *args), kwargs).get("model") or self._trainer.model
        with (
            strict_loading.explained(path),
            strict_loading.strict_adapters(model, path),
            strict_loading.every_adapter(model, path),
        ):
            self._real["_load_from_checkpoint"](path, *args, **kwargs)

    def _load_best_model(self) -> None:
        self._loading = self._trainer.state.best_model_checkpoint
        with (
            strict_loading.explained(self._loading),
            strict_loading.strict_adapters(self._trainer.model, self._loading),
        ):
            self._real["_load_best_model"]()

    def _load_optimizer_and_scheduler(self, path: str | None) -> None:
        with strict_loading.explained(path or "the checkpoint"):
            self._real["_load_optimizer_and_scheduler"](path)

    def _check_loaded(self, result: Any) -> None:
        strict_loading.complete(self._trainer.model, result, self._loading)

    def initial_training_values(self, loader: ResumableDataLoader, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """How much there is to do. Steps of another size than those that are done count as what they are."""
        epochs, in_epoch, *rest, batches, max_steps = self._real["set_initial_training_values"](*args, **kwargs)
        if self._restored is not None and self._saved is not None:
            found = resume_position.find(self._saved, self._trainer, loader, batches)
            resume_position.count(found, self._trainer, self._restored.step, in_epoch, batches, max_steps)
            self.place, self.more_steps = found, found.get("more_steps", 0)
            if self._trainer.args.max_steps > 0:
                epochs = max(epochs, found.get("epochs", 0))
            else:
                max_steps += self.more_steps
        return (epochs, in_epoch, *rest, batches, max_steps)

    def _init_training_state(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        """Where the loop goes on: in which epoch, and at which batch of it."""
        found: tuple[int, int] = self._real["_init_training_state"](*args, **kwargs)
        trainer = self._trainer
        self._session.checkpointer.pin(preflight.step_of(trainer.state.best_model_checkpoint))
        max_steps = given(self._real["_init_training_state"], args, kwargs)["max_steps"]
        if self._saved is not None:
            trainer_snapshot.order_log(trainer.state.log_history, self._saved.get("log_keys", ()))
        trainer.state.compute_steps(trainer.args, max_steps)  # how often to log and save is as the script says it now
        if self.place is None:
            return found
        preflight.check_length(trainer.state, max_steps)
        return self.place["epoch"], self.place["position"]["consumed"]

    def _load_rng_state(self, path: str | None) -> None:
        if self._saved is None:
            self._real["_load_rng_state"](path)

    def enter(self, loader: ResumableDataLoader, epoch: dict[str, Any]) -> bool:
        """The epoch that was interrupted, and what was due in it. Is it over? `epoch`: what `_run_epoch` is given."""
        trainer, resumed = self._trainer, self.place
        assert resumed is not None
        self.place = None
        trainer_snapshot.restore(trainer, resumed["moment"])
        loader.go_on(resumed["position"], lambda: None)
        self._session.restored_all()
        control, state = trainer.control, trainer.state
        if state.global_step >= resumed["max_steps"]:
            control.should_training_stop = state.global_step >= state.max_steps
        if self._session.finished and control.should_training_stop:
            log.warning("already finished after %d steps: nothing to train", state.global_step)
        self.evaluation_is_due = control.should_evaluate
        if control.should_evaluate or control.should_save:
            names = ("model", "trial", "epoch", "ignore_keys_for_eval", "start_time")
            trainer._maybe_log_save_evaluate(
                trainer._tr_loss, None, **{name: epoch[name] for name in names}, learning_rate=None
            )
        if resumed["ended"]:
            loader.go_on(None, lambda: None)
            return True
        if (length := resumed["length"]) is not None:
            epoch["steps_in_epoch"], epoch["num_update_steps_per_epoch"] = (
                length,
                resume_position.steps(trainer, length),
            )
        rng = capture_rng({})
        loader.go_on(resumed["position"], lambda: restore_rng(rng, {}))
        if control.should_epoch_stop or control.should_training_stop:
            # No batch is left, and the end of the epoch is.
            done = epoch["steps_trained_in_current_epoch"] // trainer.args.gradient_accumulation_steps
            epoch["num_update_steps_per_epoch"] = done
        return False
