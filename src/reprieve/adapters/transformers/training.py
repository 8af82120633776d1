"""One call of `train`: what happens in place of some of the trainer's methods while it runs.

    train ─► resume ─► _run_epoch ─► get_batch_samples: a boundary ─► a step ─► log, evaluate, save ─► … ─► finished
                                                                          └─ prediction_step: boundaries in there

Before each fetch everything up to there is a completed step: there it is saved when our schedule says so, and stopped.
A checkpoint says how far the loop was in its epoch, and in its control's flags what was still due (`resuming.py`).
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from reprieve.adapters.transformers import deepspeed, drill_parts, preflight
from reprieve.adapters.transformers.patching import given, replaced
from reprieve.adapters.transformers.resume import experiment_trackers, trainer_snapshot
from reprieve.adapters.transformers.resume.hooks import TrainerResume
from reprieve.adapters.transformers.resume.resumable_dataloader import ResumableDataLoader, sought
from reprieve.adapters.transformers.save.checkpoint_contents import CheckpointContents
from reprieve.adapters.transformers.save.hub_push import HubPusher
from reprieve.preemption.process_exit import process_exit
from reprieve.run_state import RunState
from reprieve.rng import capture_rng, restore_rng
from reprieve.session import ddp_buckets
from reprieve.session.adapter import CapturedState, TrainingProgress
from reprieve.session.run_reporter import in_drill
from reprieve.session.session import Session
from reprieve.settings import NEVER, Settings


class ProtectedTraining:
    """Of one trainer, from the session's beginning to its end."""

    def __init__(self, trainer: Any, pushing: HubPusher, settings: Settings, rest: Mapping[str, Any]) -> None:
        """`rest`: options of the session."""
        self._trainer = trainer
        self._pushing = pushing
        self._contents = CheckpointContents(trainer, trainer._save_checkpoint, pushing)
        self._real: dict[str, Callable[..., Any]] = {}
        """The trainer's own methods, of those that are replaced."""
        self._loader: ResumableDataLoader | None = None
        self._before: trainer_snapshot.EvaluationSnapshot | None = None
        """The trainer before the evaluation that is running."""
        self._logging = False
        """The loop is at what it does between steps."""
        self._where = {"epoch": 0, "ended": False}
        self._first = True
        """No step was done in this process."""
        self._line: tuple[tuple[Any, ...], Mapping[str, Any]] | None = None
        """What `_maybe_log_save_evaluate` was given for the last step."""
        self._last: dict[str, Any] = {}
        """What a log line says of the last step, if that was before the resume."""
        self._evaluation_loaders: set[str] = set()
        """Those whose persistent workers the interrupted process had, and this one does not have yet."""
        self._watched: ddp_buckets.BucketOrder | None = None
        self._buckets: list[str] = []
        self._generation: dict[str, Any] = {}
        """How the script's model generates, before the first evaluation."""
        self._best_before: str | None = None
        """The best checkpoint before the last save: should that be lost, this is it."""
        self._began, self._earlier_s = time.monotonic(), 0.0
        trainer.state.global_step = 0  # of an earlier training
        self._batches: Iterator[Any] | None = None
        """Where the next batch would come from. None: the stop is in an evaluation, after which it may be another."""
        self._watch_first = False
        """In a drill: the next batch is the first after the resume."""
        self._session = Session(
            settings,
            adapter=self,
            state={},
            rng=False,
            bar=preflight.replaces_bar(trainer),
            **rest,
        )
        self._by_count = self._session.checkpointer.schedule.by_count

    def run(self, train: Callable[..., Any], asked: Any, *args: Any, **kwargs: Any) -> Any:
        """`train`: the trainer's own. `asked`: which checkpoint the script asked it to resume from."""
        session = self._session
        together = False
        try:
            self._resuming = TrainerResume(self._trainer, session, self._real, asked)
            self._contents.asked_at = self._resuming.requested_at
            place = self._resuming.place
            with (
                self._hooked(),
                sought(self._trainer.args),
                preflight.bar_replaced(self._trainer),
                experiment_trackers.going_on(self._trainer, place["followers"] if place else {}),
                deepspeed.read_safely(self._trainer),
            ):
                result = train(self._resuming.path, *args, **kwargs)
            together = True
            return result
        except BaseException as error:
            session.reporter.refused(error)
            raise
        finally:
            if session.stopped is None:
                session.close(together=together)

    @contextlib.contextmanager
    def _hooked(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for name, ours in {**self._resuming.hooks(), **self._hooks()}.items():
                real = self._real[name] = getattr(self._trainer, name)
                stack.enter_context(replaced(self._trainer, name, _as(real, ours)))
            handler = self._trainer.callback_handler
            stack.enter_context(replaced(handler, "on_save", functools.partial(self._on_save, handler.on_save)))
            yield

    def _hooks(self) -> dict[str, Callable[..., Any]]:
        """What is called in place of methods of the trainer."""
        return {
            "get_train_dataloader": lambda: ResumableDataLoader(self._real["get_train_dataloader"]()),
            "set_initial_training_values": self._set_initial_training_values,
            "_run_epoch": self._run_epoch,
            "get_batch_samples": self._get_batch_samples,
            "_maybe_log_save_evaluate": self._maybe_log_save_evaluate,
            "_evaluate": self._evaluate_for_loop,
            "evaluate": self._evaluate,
            "prediction_step": self._prediction_step,
            "_save_checkpoint": self._save_checkpoint,
            "_finalize_training": self._finalize_training,
            "get_eval_dataloader": self._get_eval_dataloader,
        }

    def position(self) -> TrainingProgress:
        trainer = self._trainer
        state, args = trainer.state, trainer.args
        step = int(state.global_step)
        in_step = trainer._train_batch_size * args.gradient_accumulation_steps * args.world_size
        # TRL counts tokens always, transformers if it is told to (include_num_input_tokens_seen).
        tokens = getattr(trainer, "_total_train_tokens", 0) or state.num_input_tokens_seen
        return TrainingProgress(
            step, state.max_steps, state.epoch, state.num_train_epochs, step * in_step, int(tokens) if tokens else None
        )

    # The beginning

    def _set_initial_training_values(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Which loader is trained with: callbacks may ask for others."""
        told = given(self._real["set_initial_training_values"], args, kwargs)
        self._loader = next(one for one in told.values() if isinstance(one, ResumableDataLoader))
        return self._resuming.initial_training_values(self._loader, *args, **kwargs)

    def begun(self) -> None:
        """on_train_begin: everything is loaded, and nothing trained."""
        self._watched = ddp_buckets.watch({"model": self._trainer.model_wrapped}).get("model")
        if self._trainer.args.save_strategy != "no":
            self._session.reporter.tracker.checkpoints(enabled=True)
        self._generation = trainer_snapshot.generation(self._trainer)
        resumed = self._resuming.place
        if resumed is None:
            return
        self._evaluation_loaders = set(resumed["moment"].get("evaluation_loaders", ()))
        trainer_snapshot.change_generation(self._trainer, resumed.get("generation", {}))
        if self._watched is not None:
            self._watched.take(resumed["buckets"])
            self._buckets = resumed["buckets"]
        self._last, self._earlier_s = dict(resumed["last"]), resumed["seconds"]
        if resumed["source"] is not None:
            assert self._loader is not None
            self._loader.restore(resumed["source"])

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        real = self._real["_run_epoch"]
        epoch = given(real, args, kwargs)
        self._where = {"epoch": epoch["epoch"], "ended": False}
        if (resumed := self._resuming.place) is not None:
            assert self._loader is not None
            self._where["ended"] = resumed["ended"]
            if self._resuming.enter(self._loader, epoch):
                return
            self._watch_first = in_drill()
        real(**epoch)

    # Boundaries

    def _get_batch_samples(self, batches: Iterator[Any], *args: Any, **kwargs: Any) -> Any:
        session, loader = self._session, self._loader
        assert loader is not None
        loader.mark()
        if session.stopped is not None:
            raise session.stopped  # somebody has caught it
        boundaries = session.boundaries
        if self._by_count and session.checkpointer.schedule.due_at(self._trainer.state.global_step):
            boundaries.save_is_due()
        boundaries.step()
        if boundaries.has_request:
            flags = self._trainer.control
            flags.should_evaluate = flags.should_save = False
            if boundaries.stop_requested:
                self._batches = batches
                self._stop()
            if self._trainer.state.global_step == session.last_saved:
                boundaries.saved()  # the script asked for this step, too
            else:
                self._save_beside(background=True)
        if self._watch_first:
            self._watch_first = False
            batches = drill_parts.watch_first(batches, self._report_first)
        return self._real["get_batch_samples"](batches, *args, **kwargs)

    def _report_first(self, batch: Any) -> None:
        assert self._loader is not None
        self._session.reporter.restored(functools.partial(drill_parts.data_order, batch, self._loader))

    def drill_parts(self) -> dict[str, Any]:
        """The state in memory, at a stop or after a resume. Called only in a drill."""
        assert self._loader is not None
        found = drill_parts.parts(self._trainer, self._loader, self._where)
        if self._batches is not None:
            # There may be collectives in it: all ranks stand at this boundary, and all do this.
            for batch in itertools.islice(self._batches, 1):
                found |= drill_parts.data_order(batch, self._loader)
        return found

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        # After every step: each call that is not made is a microsecond.
        real = self._real["_maybe_log_save_evaluate"]
        if self._first:
            self._first = False
            self._after_first_step()
        if self._last:
            kwargs, args = self._with_last(given(real, args, kwargs)), ()
        self._line = args, kwargs
        self._logging = True
        try:
            real(*args, **kwargs)
        finally:
            self._logging = False

    def _after_first_step(self) -> None:
        """Memory for the copies that periodic saves write from is made beside training; DDP has sorted its buckets."""
        session = self._session
        if self._watched is not None:
            self._buckets = self._watched.known()
        if self._trainer.args.save_strategy != "no" or session.settings.every != NEVER:
            session.checkpointer.warm_up(more=self._contents.size(session.ranks.rank))

    def _with_last(self, line: dict[str, Any]) -> dict[str, Any]:
        """The end of an epoch whose last step was before the resume has nothing to say of it."""
        if line.get("learning_rate") is None:
            return line | self._last
        self._last = {}
        return line

    def _of_last_step(self) -> dict[str, float | None]:
        """What a log line says of it."""
        line = given(self._real["_maybe_log_save_evaluate"], *self._line) if self._line else self._last
        values = {name: line.get(name) for name in ("grad_norm", "learning_rate")}
        return {name: None if value is None else float(value) for name, value in values.items()}

    def _evaluate_for_loop(self, *args: Any, **kwargs: Any) -> Any:
        if self._resuming.place is not None:
            return {}  # eval_on_start: it was evaluated when it was started
        before, self._logging = self._logging, True
        try:
            return self._real["_evaluate"](*args, **kwargs)
        finally:
            self._logging = before

    def _prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._before is not None:
            self._stop_in_evaluation(self._session.boundaries.evaluation_step)
        return self._real["prediction_step"](*args, **kwargs)

    def _evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Each evaluation of a dataset; one of several datasets has others in it."""
        if not self._logging or self._before is not None:
            return self._real["evaluate"](*args, **kwargs)
        self._before = trainer_snapshot.EvaluationSnapshot(self._trainer)
        try:
            self._stop_in_evaluation(self._session.boundaries.step)
            with self._session.reporter.tracker.pausing(RunState.EVALUATING):
                metrics = self._real["evaluate"](*args, **kwargs)
        finally:
            self._before = None
        if self._resuming.evaluation_is_due:
            self._resuming.evaluation_is_due = False
            self._session.last_saved = None  # what is saved of this step does not have it
        return metrics

    def _get_eval_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        real = self._real["get_eval_dataloader"]
        loader, key = real(*args, **kwargs), given(real, args, kwargs).get("eval_dataset")
        key = key if isinstance(key, str) else "eval"  # as transformers names them
        if key in self._evaluation_loaders:
            self._evaluation_loaders.remove(key)
            rng = capture_rng({})
            iter(getattr(loader, "base_dataloader", loader))  # workers start, and draw a seed: that was before
            restore_rng(rng, {})
        return loader

    def _stop_in_evaluation(self, come: Callable[[], None]) -> None:
        session = self._session
        if session.stopped is not None:
            raise session.stopped
        come()
        if session.boundaries.stop_requested:
            assert self._before is not None
            self._before.go_back()
            self._stop()

    def _stop(self) -> None:
        session = self._session
        self._pushing.stop()
        stopped = session.stop()
        assert self._loader is not None
        self._loader.end_workers()
        process_exit.raise_or_exit(stopped)

    # Saving

    def _save_checkpoint(self, model: Any, trial: Any, *args: Any, **kwargs: Any) -> None:
        """Hugging Face says that a save is due. One of this step that it had not asked for is replaced: it was saved at
        a stop, before an evaluation was done or an epoch had ended."""
        session = self._session
        step = self._trainer.state.global_step
        if step == session.last_saved == self._contents.asked_at:
            self._contents.note_best(session.root)
            self._pin()
            self._pushing.push(session)  # it was saved at a stop, and not pushed
        else:
            self._contents.asked_at = step
            self._save_beside(background=not self._contents.somebody_looks())

    def _on_save(self, real: Callable[..., Any], args: Any, state: Any, control: Any) -> Any:
        """Callbacks are shown the checkpoint where it is. One that storage refused is not shown: training goes on."""
        session = self._session
        control.should_save = False
        if state.global_step != session.last_saved:
            return control
        if Path(args.output_dir).absolute() != session.root:
            args = copy.copy(args)
            args.output_dir = str(session.root)
        return real(args, state, control)

    def _save_beside(self, *, background: bool) -> None:
        self._settle()
        self._session.save_periodically(background=background and not self._trainer.args.push_to_hub)

    def capture(self) -> CapturedState:
        """What the trainer would save for this step, and where the loop is."""
        state = self._trainer.state
        self._best_before = state.best_model_checkpoint
        return CapturedState(
            epoch=state.epoch,
            metrics=self._contents.metrics(),
            values={"transformers": self._values()},
            extra_files=lambda: self._contents.collect(self._session),
            unrequested=self._contents.asked_at != state.global_step,
            replace=True,
        )

    def saved(self) -> None:
        """Keep the best checkpoint and push the new one."""
        self._pin(self._best_before)  # until the new one is durable
        self._pushing.push(self._session)

    def save_failed(self) -> None:
        """Go back to the best of the checkpoints that exist."""
        self._trainer.state.best_model_checkpoint = self._best_before

    def _pin(self, *more: str | None) -> None:
        """The best checkpoint stays."""
        best = (self._trainer.state.best_model_checkpoint, *more)
        self._session.checkpointer.pin(*map(preflight.step_of, best))

    def _settle(self) -> None:
        """The save before this one is done, or lost."""
        state = self._trainer.state
        if self._session.drain_save() and not Path(state.best_model_checkpoint or ".").is_dir():
            state.best_model_checkpoint = self._best_before

    def _values(self) -> dict[str, Any]:
        trainer, loader = self._trainer, self._loader
        assert loader is not None
        loader.mark()  # here, too: the step may be followed by a save before the next fetch
        now, requested = trainer_snapshot.capture(trainer), self._contents.asked_at == trainer.state.global_step
        now["flags"]["should_save"] &= not requested  # once it is resumed from, it is done
        return {
            **self._where,
            "position": loader.position,
            "source": loader.state(),
            "moment": now,
            "last": self._of_last_step(),
            "buckets": self._buckets,
            "max_steps": trainer.state.max_steps,
            "world_size": trainer.args.world_size,
            "batch_size": trainer._train_batch_size,
            "accumulation": trainer.args.gradient_accumulation_steps,
            "more_steps": self._resuming.more_steps,
            "epochs": trainer.state.num_train_epochs,
            "seconds": self._earlier_s + time.monotonic() - self._began,
            "given": self._resuming.given,
            "followers": experiment_trackers.ids(trainer),
            "requested": requested,
            "log_keys": trainer_snapshot.log_keys(trainer.state.log_history),
            "generation": trainer_snapshot.changes(self._generation, trainer_snapshot.generation(trainer)),
        }

    # The end

    def epoch_ended(self) -> None:
        """on_epoch_end, the last of the callbacks."""
        self._where["ended"] = True
        if self._by_count and self._session.checkpointer.schedule.due_at(self.position().step, epoch_ended=True):
            self._session.boundaries.save_is_due()

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        session, trainer = self._session, self._trainer
        real = self._real["_finalize_training"]
        session.boundaries.finish()
        self._settle()
        if session.settings.save_at_end and trainer.state.global_step != session.last_saved:
            session.save(background=False)
        session.finish({"max_steps": trainer.state.max_steps})
        end = given(real, args, kwargs)
        end["start_time"] -= self._earlier_s
        with self._contents.nowhere():  # it would remove checkpoints
            return real(**end)

    def logged(self, logs: Mapping[str, Any]) -> None:
        """on_log."""
        self._session.reporter.tracker.metrics(logs)


def _as(real: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    """Ours, with the name and the signature of the trainer's own."""
    return functools.wraps(real)(functools.partial(ours))
