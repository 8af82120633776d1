"""Runs one call of a trainer's `train` under protection, by replacing some of the trainer's methods while it runs.

    train ─► resume ─► _run_epoch ─► get_batch_samples: a boundary ─► a step ─► log, evaluate, save ─► … ─► finish
                                                                                     └─ boundaries in evaluations

Before each fetch of batches, all work so far is part of a completed step: periodic saves and stops happen there. A
checkpoint records how far the loop is (`trainer_state.py`) and what is still due at its step; `resume/hooks.py`
re-enters the loop there. `ProtectedTraining` is the session's adapter.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from reprieve.adapters.transformers import deepspeed, drill_parts, preflight
from reprieve.adapters.transformers.evaluations import ProtectedEvaluations
from reprieve.adapters.transformers.patching import call_arguments, hooked
from reprieve.adapters.transformers.resume import experiment_trackers, trainer_snapshot
from reprieve.adapters.transformers.resume.hooks import TrainerResume
from reprieve.adapters.transformers.resume.resumable_dataloader import ResumableDataLoader, seek_instead_of_skip
from reprieve.adapters.transformers.save.checkpoint_contents import CheckpointContents
from reprieve.adapters.transformers.save.hub_push import HubPusher
from reprieve.adapters.transformers.trainer_state import TrainerState
from reprieve.preemption.process_exit import process_exit
from reprieve.session import ddp_buckets
from reprieve.session.adapter import CapturedState, TrainingProgress
from reprieve.session.session import Session
from reprieve.settings import NEVER, Settings


class ProtectedTraining:
    """One training of a trainer, from the start of its session to the end."""

    def __init__(
        self, trainer: Any, hub_pusher: HubPusher, settings: Settings, session_options: Mapping[str, Any]
    ) -> None:
        self._trainer = trainer
        self._hub_pusher = hub_pusher
        self._contents = CheckpointContents(trainer, trainer._save_checkpoint, hub_pusher)
        self._train_loader: ResumableDataLoader | None = None
        self._epoch, self._epoch_ended = 0, False
        self._no_step_done = True
        """No step was completed in this process."""
        self._log_call: tuple[Callable[..., Any], tuple[Any, ...], Mapping[str, Any]] | None = None
        """`_maybe_log_save_evaluate` and its arguments, for the last step."""
        self._restored_log: dict[str, Any] = {}
        """What a log line shows of the last step, if that step was before the resume."""
        self._bucket_order: ddp_buckets.BucketOrder | None = None
        self._ddp_buckets: list[str] = []
        self._initial_generation: dict[str, Any] = {}
        """The script's generation_config, before the first evaluation."""
        self._previous_best: str | None = None
        """The best checkpoint before the last save. It is the best again if that save is lost."""
        self._started, self._earlier_s = time.monotonic(), 0.0
        trainer.state.global_step = 0  # it may be that of an earlier training
        self._next_batches: Iterator[Any] | None = None
        """The iterator that the next batch would come from at a stop. None: the stop is in an evaluation, and another
        iterator may follow."""
        self._report_next_batch = False
        """In a drill: the next batch is the first after the resume."""
        self._session = Session(
            settings,
            adapter=self,
            state={},
            rng=False,
            bar=preflight.replaces_bar(trainer),
            **session_options,
        )
        self._saves_by_count = self._session.checkpointer.schedule.by_count
        self._resume = TrainerResume(trainer, self._session)
        self._evaluations = ProtectedEvaluations(trainer, self._session, self._resume, self._stop)

    def run(self, train: Callable[..., Any], resume_from_checkpoint: Any, *args: Any, **kwargs: Any) -> Any:
        """Call the trainer's own `train`. `resume_from_checkpoint`: what the script passed to it."""
        session, trainer, resume = self._session, self._trainer, self._resume
        together = False
        try:
            resume.restore_checkpoint(resume_from_checkpoint)
            self._contents.requested_step = resume.requested_step
            with (
                hooked(trainer, {**resume.hooks(), **self._hooks()}),
                hooked(trainer.callback_handler, {"on_save": self._on_save}),
                seek_instead_of_skip(trainer.args),
                preflight.bar_replaced(trainer),
                experiment_trackers.continued_runs(trainer, resume.saved.tracker_runs if resume.saved else {}),
                deepspeed.safe_loading(trainer),
            ):
                result = train(resume.path, *args, **kwargs)
            together = True
            return result
        except BaseException as error:
            session.reporter.refused(error)
            raise
        finally:
            if session.stopped is None:
                session.close(together=together)

    def _hooks(self) -> dict[str, Callable[..., Any]]:
        """The replacements of the trainer's methods. Each gets the original as its first argument."""
        return {
            "get_train_dataloader": lambda original: ResumableDataLoader(original()),
            "set_initial_training_values": self._set_initial_training_values,
            "_run_epoch": self._run_epoch,
            "get_batch_samples": self._get_batch_samples,
            "_maybe_log_save_evaluate": self._maybe_log_save_evaluate,
            "_save_checkpoint": self._save_checkpoint,
            "_finalize_training": self._finalize_training,
            **self._evaluations.hooks(),
        }

    @property
    def _loader(self) -> ResumableDataLoader:
        """The DataLoader that the loop trains with."""
        assert self._train_loader is not None
        return self._train_loader

    # The start

    def _set_initial_training_values(
        self, original: Callable[..., tuple[Any, ...]], *args: Any, **kwargs: Any
    ) -> tuple[Any, ...]:
        # Only here is it certain which loader is trained with: callbacks may request others.
        arguments = call_arguments(original, args, kwargs).values()
        self._train_loader = next(value for value in arguments if isinstance(value, ResumableDataLoader))
        return self._resume.compute_training_values(original, self._train_loader, *args, **kwargs)

    def on_train_begin(self) -> None:
        """Restore what the trainer does not load itself. Everything is loaded here, and nothing trained."""
        self._bucket_order = ddp_buckets.watch({"model": self._trainer.model_wrapped}).get("model")
        if self._trainer.args.save_strategy != "no":
            self._session.reporter.tracker.checkpoints(enabled=True)
        self._initial_generation = trainer_snapshot.generation_settings(self._trainer)
        saved = self._resume.saved
        if saved is None or not self._resume.is_pending:
            return
        self._evaluations.restart_workers_of(saved.snapshot.evaluation_loaders)
        trainer_snapshot.apply_generation_changes(self._trainer, saved.generation_changes)
        position = self._resume.position
        if self._bucket_order is not None:
            self._bucket_order.take(position.ddp_buckets)
            self._ddp_buckets = list(position.ddp_buckets)
        self._restored_log, self._earlier_s = dict(saved.last_log), saved.elapsed_s
        if position.loader_state is not None:
            self._loader.restore(position.loader_state)

    def _run_epoch(self, original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        arguments = call_arguments(original, args, kwargs)
        self._epoch, self._epoch_ended = arguments["epoch"], False
        resume = self._resume
        if resume.is_pending:
            self._epoch_ended = resume.position.epoch_ended
            resume.restore_trainer(self._loader)
            resume.run_due_work(arguments)
            if resume.position.epoch_ended:
                self._loader.resume_at(None)
                return
            arguments = resume.rest_of_epoch(self._loader, arguments)
            self._report_next_batch = self._session.reporter.is_drill
        original(**arguments)

    # Steps

    def position(self) -> TrainingProgress:
        trainer = self._trainer
        state, args = trainer.state, trainer.args
        step = int(state.global_step)
        samples_in_step = trainer._train_batch_size * args.gradient_accumulation_steps * args.world_size
        # TRL always counts tokens, transformers with include_num_input_tokens_seen.
        tokens = getattr(trainer, "_total_train_tokens", 0) or state.num_input_tokens_seen
        return TrainingProgress(
            step=step,
            total_steps=state.max_steps,
            epoch=state.epoch,
            total_epochs=state.num_train_epochs,
            samples=step * samples_in_step,
            tokens=int(tokens) if tokens else None,
        )

    def _get_batch_samples(
        self, original: Callable[..., Any], batches: Iterator[Any], *args: Any, **kwargs: Any
    ) -> Any:
        """A boundary: everything before it belongs to completed steps."""
        session = self._session
        self._loader.mark()
        if session.stopped is not None:
            raise session.stopped  # the script has caught it
        boundaries = session.boundaries
        if self._saves_by_count and session.checkpointer.schedule.due_by_count(self._trainer.state.global_step):
            boundaries.save_is_due()
        boundaries.step()
        if boundaries.has_request:
            control = self._trainer.control
            control.should_evaluate = control.should_save = False
            if boundaries.stop_requested:
                self._next_batches = batches
                self._stop()
            if self._trainer.state.global_step == session.last_saved:
                boundaries.saved()  # the save strategy has requested this step, too
            else:
                self._save_periodically(background=True)
        if self._report_next_batch:
            self._report_next_batch = False
            batches = drill_parts.report_first_batch(batches, self._report_first_batch)
        return original(batches, *args, **kwargs)

    def _maybe_log_save_evaluate(self, original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        # Runs after every step, and each function call costs about a microsecond.
        if self._no_step_done:
            self._no_step_done = False
            self._after_first_step()
        if self._restored_log:
            kwargs, args = self._with_restored_log(call_arguments(original, args, kwargs)), ()
        self._log_call = original, args, kwargs
        self._evaluations.between_steps = True
        try:
            original(*args, **kwargs)
        finally:
            self._evaluations.between_steps = False

    def _after_first_step(self) -> None:
        """Allocate staging memory for periodic saves beside training, and note the buckets that DDP has sorted."""
        session = self._session
        if self._bucket_order is not None:
            self._ddp_buckets = self._bucket_order.known()
        if self._trainer.args.save_strategy != "no" or session.settings.every != NEVER:
            session.checkpointer.warm_up(more=self._contents.estimated_bytes(session.ranks.rank))

    def _with_restored_log(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Fill in the last step's values at the end of an epoch whose last step was before the resume."""
        if arguments.get("learning_rate") is None:
            return arguments | self._restored_log
        self._restored_log = {}
        return arguments

    def _last_log(self) -> dict[str, float | None]:
        """Return what a log line shows of the last step."""
        values = self._restored_log
        if self._log_call is not None:
            original, args, kwargs = self._log_call
            values = call_arguments(original, args, kwargs)
        named = {name: values.get(name) for name in ("grad_norm", "learning_rate")}
        return {name: None if value is None else float(value) for name, value in named.items()}

    def _stop(self) -> None:
        self._hub_pusher.stop()
        stopped = self._session.stop()
        self._loader.end_workers()
        process_exit.raise_or_exit(stopped)

    # Drills

    def drill_parts(self) -> dict[str, Any]:
        """Return the state in memory, at a stop or after a resume. The session calls this only in a drill."""
        epoch = {"epoch": self._epoch, "ended": self._epoch_ended}
        parts = drill_parts.training_parts(self._trainer, self._loader, epoch)
        if self._next_batches is not None:
            # Fetching may run collectives: all ranks are at this boundary, and all fetch.
            for batch in itertools.islice(self._next_batches, 1):
                parts |= drill_parts.data_order(batch, self._loader)
        return parts

    def _report_first_batch(self, batch: Any) -> None:
        self._session.reporter.restored(functools.partial(drill_parts.data_order, batch, self._loader))

    # Saving

    def _save_checkpoint(
        self, original: Callable[..., None], model: Any, trial: Any, *args: Any, **kwargs: Any
    ) -> None:
        """Save because the save strategy requests it.

        A checkpoint of this step that the strategy had not requested is replaced: it was saved at a stop, before an
        evaluation ran or the epoch ended.
        """
        session = self._session
        step = self._trainer.state.global_step
        if step == session.last_saved == self._contents.requested_step:
            self._contents.update_best_checkpoint(session.root)
            self._pin_best()
            self._hub_pusher.push(session)  # a stop saves without pushing
        else:
            self._contents.requested_step = step
            self._save_periodically(background=not self._contents.is_read_by_callbacks())

    def _on_save(self, original: Callable[..., Any], args: Any, state: Any, control: Any) -> Any:
        """Show the checkpoint to callbacks at its real path. A save that failed is not shown; training continues."""
        session = self._session
        control.should_save = False
        if state.global_step != session.last_saved:
            return control
        if Path(args.output_dir).absolute() != session.root:
            args = copy.copy(args)
            args.output_dir = str(session.root)
        return original(args, state, control)

    def _save_periodically(self, *, background: bool) -> None:
        self._drain_save()
        self._session.save_periodically(background=background and not self._trainer.args.push_to_hub)

    def capture(self) -> CapturedState:
        """Describe what the trainer would save for this step, and where the loop is."""
        state = self._trainer.state
        self._previous_best = state.best_model_checkpoint
        return CapturedState(
            epoch=state.epoch,
            metrics=self._contents.metrics(),
            values={"transformers": self._trainer_state().to_state()},
            extra_files=lambda: self._contents.collect(self._session),
            unrequested=self._contents.requested_step != state.global_step,
            replace=True,
        )

    def saved(self) -> None:
        """Keep the best checkpoint and push the new one."""
        self._pin_best(self._previous_best)  # until the new one is durable
        self._hub_pusher.push(self._session)

    def save_failed(self) -> None:
        """Go back to the best of the checkpoints that exist."""
        self._trainer.state.best_model_checkpoint = self._previous_best

    def _pin_best(self, *others: str | None) -> None:
        """Keep retention from removing the best checkpoint, and others."""
        checkpoints = (self._trainer.state.best_model_checkpoint, *others)
        self._session.checkpointer.pin(*map(preflight.step_of, checkpoints))

    def _drain_save(self) -> None:
        """Wait for the previous save. If it failed, the best checkpoint may be the one before."""
        state = self._trainer.state
        if self._session.drain_save() and not Path(state.best_model_checkpoint or ".").is_dir():
            state.best_model_checkpoint = self._previous_best

    def _trainer_state(self) -> TrainerState:
        trainer, loader = self._trainer, self._loader
        loader.mark()  # a save may follow the step before the next fetch does
        snapshot = trainer_snapshot.capture(trainer)
        save_requested = self._contents.requested_step == trainer.state.global_step
        if save_requested:  # this save is the one that was due
            flags = {**snapshot.control_flags, "should_save": False}
            snapshot = dataclasses.replace(snapshot, control_flags=flags)
        generation = trainer_snapshot.generation_settings(trainer)
        return TrainerState(
            epoch=self._epoch,
            epoch_ended=self._epoch_ended,
            data_position=loader.position,
            loader_state=loader.state(),
            snapshot=snapshot,
            last_log=self._last_log(),
            ddp_buckets=self._ddp_buckets,
            max_steps=trainer.state.max_steps,
            world_size=trainer.args.world_size,
            batch_size=trainer._train_batch_size,
            gradient_accumulation_steps=trainer.args.gradient_accumulation_steps,
            extra_steps=self._resume.extra_steps,
            num_train_epochs=trainer.state.num_train_epochs,
            elapsed_s=self._earlier_s + time.monotonic() - self._started,
            script_checkpoint=self._resume.script_checkpoint,
            tracker_runs=experiment_trackers.run_ids(trainer),
            save_requested=save_requested,
            log_key_orders=trainer_snapshot.log_key_orders(trainer.state.log_history),
            generation_changes=trainer_snapshot.generation_changes(self._initial_generation, generation),
        )

    # The end

    def on_epoch_end(self) -> None:
        """Note that the epoch has ended. Reprieve's callback is the last one."""
        self._epoch_ended = True
        schedule = self._session.checkpointer.schedule
        if self._saves_by_count and schedule.due_by_count(self.position().step, epoch_ended=True):
            self._session.boundaries.save_is_due()

    def on_log(self, logs: Mapping[str, Any]) -> None:
        """Report what the trainer logs."""
        self._session.reporter.tracker.metrics(logs)

    def _finalize_training(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        session, trainer = self._session, self._trainer
        session.boundaries.finish()
        self._drain_save()
        if session.settings.save_at_end and trainer.state.global_step != session.last_saved:
            session.save(background=False)
        session.finish({"max_steps": trainer.state.max_steps})
        arguments = call_arguments(original, args, kwargs)
        arguments["start_time"] -= self._earlier_s
        with self._contents.checkpoints_hidden():  # it would remove checkpoints
            return original(**arguments)
