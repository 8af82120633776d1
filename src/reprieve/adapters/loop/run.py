"""`reprieve.Run`: a plain PyTorch loop that can be stopped at any moment and goes on exactly there.

    run.epochs → run.batches → (a step) → run.step → … → run.evaluation → …

Everything happens at boundaries (`boundary.py`): before each fetch of a batch, before and in each evaluation, after
each epoch. There, and only there, the run is saved or stopped; between two of them nothing of ours runs but `step`,
which counts. So what stands in a loop after `run.step()` (a log line, an evaluation) has run before that step is saved.
"""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch

from reprieve.adapters.loop.evaluation_reentry import EvaluationReentry
from reprieve.adapters.loop.loop_position import DataPass, LoopPosition
from reprieve.adapters.loop.rollback import Rollback
from reprieve.adapters.loop.sample_counter import SampleCounter, sizes
from reprieve.adapters.loop.step_timer import StepTimer
from reprieve.checkpoint.checkpointer import Checkpointer
from reprieve.checkpoint.results import Restored
from reprieve.checkpoint.schedule import Every
from reprieve.clock import Clock
from reprieve.errors import ConfigError, StateMismatch
from reprieve.preemption.process_exit import process_exit
from reprieve.progress.snapshot import EVALUATING
from reprieve.ranks.group import LIMIT, Ranks
from reprieve.rng import capture_rng, restore_rng
from reprieve.session import ddp_buckets
from reprieve.session.run_reporter import TrainingProgress
from reprieve.session.session import Session
from reprieve.session.startup_errors import reporting_startup_errors
from reprieve.settings import resolve
from reprieve.storage.disk import Disk

log = logging.getLogger("reprieve")

T = TypeVar("T")


class Run:
    """A training run: saved in the background every so often, stopped by a signal, resumed where it was.

        run = reprieve.Run("checkpoints", model=model, optimizer=optimizer, scheduler=scheduler)
        for epoch in run.epochs(3):
            for batch in run.batches(loader):
                loss = train(batch)
                run.step(loss=loss)
            for batch in run.evaluation(eval_loader):
                ...

    State (`model=`, `optimizer=`, and whatever else belongs to the run, by name) is restored here if there is a
    checkpoint to resume from. `uri`, `every`, `keep`, `fresh`, `grace_period`, `kill_wait` and `name` default to the
    environment (`reprieve run` sets it), then to a save every 10 minutes and the last 3 checkpoints. `every` may be
    "never", or "auto" for an interval from the cost of a save and the rate of interruptions; `keep` may be "all".
    `keep_every`, `best`, `strict`, `take_over_after`, `rank_timeout`, `ranks`: see `Checkpointer`.

    `grace_period`: how long the process has after the signal, "2m" or seconds. Default: `REPRIEVE_GRACE`, else what is
        known of the platform.
    `kill_wait`: how long to go on after the signal before saving.
    `signals`: which signals stop the run.
    `notices`: which clouds' notices stop it: "auto" (where the machine says that it is there), "off", "aws", ….
    `exit_wait`: how long the script may still run after it was stopped, before the process is ended.
    """

    def __init__(
        self,
        uri: str | os.PathLike[str] | None = None,
        *,
        every: Every = None,
        keep: int | str | None = None,
        keep_every: int | None = None,
        best: tuple[str, str] | None = None,
        name: str | None = None,
        fresh: bool | None = None,
        strict: bool = True,
        grace_period: str | float | timedelta | None = None,
        kill_wait: str | float | timedelta | None = None,
        signals: Iterable[int | str] = (signal.SIGTERM,),
        notices: str | Sequence[str] = "auto",
        exit_wait: str | float | timedelta = "5s",
        take_over_after: str | float | timedelta = "60s",
        rank_timeout: str | float | timedelta = LIMIT,
        ranks: Ranks | None = None,
        disk: Disk | None = None,
        clock: Clock | None = None,
        **state: object,
    ) -> None:
        given = {"checkpoints": uri and os.fspath(uri), "every": every, "keep": keep, "name": name, "fresh": fresh}
        with reporting_startup_errors():
            settings = resolve({**given, "kill_wait": kill_wait}, options=False)
            if settings.checkpoints is None:
                raise ConfigError("where do the checkpoints go? Run('checkpoints', …), or CHECKPOINT_URI")
        self._place = LoopPosition()
        self._asked: list[int | None] = [None, None]
        self._metrics: dict[str, Any] = {}
        self._counting = SampleCounter()
        self._session = session = Session(
            settings,
            position=self._position,
            state=state,
            grace_period=grace_period,
            signals=signals,
            notices=notices,
            exit_wait=exit_wait,
            rank_timeout=rank_timeout,
            ranks=ranks,
            disk=disk,
            clock=clock,
            keep_every=keep_every,
            best=best,
            strict=strict,
            take_over_after=take_over_after,
        )
        self._counting.ranks = session.ranks.world_size
        self._boundaries = session.boundaries
        self._checkpointer = session.checkpointer
        try:
            modules = {name: value for name, value in state.items() if isinstance(value, torch.nn.Module)}
            self._generators = {name: one for name, one in state.items() if isinstance(one, torch.Generator)}
            self._watched = ddp_buckets.watch(modules)
            self._buckets: dict[str, list[str]] = {}
            self._first = True
            """The order of DDP's buckets is not known before the first step."""
            self._by_count = self._checkpointer.schedule.by_count
            self._pace = StepTimer()
            self._rollback = Rollback(modules, session.stop_listener.grace.period)
            self._finishing = self._completing = False
            self._pending = 0
            """Batches that were given out since the last completed step."""
            self._reentry: dict[str, Any] | None = None
            """The random numbers at the point where the loop is entered again."""
            self._evaluating: tuple[int, dict[str, Any], dict[str, Any]] | None = None
            """The source of the evaluation that is running, and its and the random numbers' state before it."""
            self._tail = False
            """The rest of a loop's body, after `step`, has still to run for the step that was restored."""
            self._lending = EvaluationReentry(self._place, self._checkpointer)
            self._steps_limit: int | None = None
            self.resumed = self._resume()
            """What the run goes on from; None: from the start."""
            session.restored(self.resumed)
            session.restored_all()
        except BaseException as error:
            session.refused(error)
            raise

    # Where the run is

    @property
    def steps(self) -> int:
        """Completed optimizer steps, those before a resume included."""
        return self._place.steps

    @property
    def epoch(self) -> int:
        """The epoch that is running, from 0."""
        return self._place.epoch

    @property
    def batch(self) -> int:
        """How many batches of this pass were given out, those before a resume included. For gradient accumulation:
        `if run.batch % 4 == 0: optimizer.step(); …; run.step()`."""
        going = self._place.going
        return going[-1].batch if going else 0

    @property
    def finished(self) -> bool:
        """Is there nothing left to train? For loops that do not use `epochs`."""
        return self._place.finished is not None

    @property
    def checkpointer(self) -> Checkpointer:
        """The engine: what is there (`list`), and whether it is good (`verify`)."""
        return self._checkpointer

    # The loop

    def epochs(self, count: int | None = None, *, steps: int | None = None) -> Iterator[int]:
        """The epochs that are left, up to `count` in all, or until `steps` steps are done. Then the run is finished."""
        if count is None and steps is None:
            raise ConfigError("epochs(): say how many, epochs(3), or how many steps, epochs(steps=10_000)")
        self._steps_limit = steps
        if self._place.finished is not None and self._place.finished != [count, steps] and not self._done(count):
            log.warning("the run was finished after %d steps, and goes on: something else was asked for", self.steps)
            self._place.finished = None
        self._asked = [count, steps]
        while self._place.finished is None and not self._done(count):
            if not self._place.resumed_passes:
                self._enter(active=True)
            yield self._place.epoch
            if self._done(None):
                break
            self._place.next_epoch()
            self._ask_for_due_save(epoch_ended=True)
            self._at_boundary()
        self.finish()

    def batches(self, loader: Iterable[T]) -> Iterator[T]:
        """The batches of one pass over the loader: from the first, or after a resume from where the run was."""
        number = self._place.source(loader)
        saved = self._place.resumed_passes.pop(0) if self._place.resumed_passes else None
        one = DataPass(number)
        self._place.passes.append(one)
        if saved is not None and saved["state"] is None:
            self._enter(active=False)
            return  # complete, before the resume
        position = None if saved is None else saved["state"]
        if saved is not None:
            one.batch = one.marked = saved["batch"]
            if self._tail:
                self._tail = False
                yield from self._lending.lend(one, position)
        source = self._place.sources[number]
        counting, of_batches = self._counting, sizes(loader, self._counting.ranks)
        one.going = going = source.start(position, enter=self._enter)
        try:
            while self._steps_limit is None or not self._done(None):
                self._at_boundary()
                try:
                    batch = next(going)
                except StopIteration:
                    break
                one.batch += 1
                self._pending += 1
                counting.pending += of_batches.of(one.batch)
                yield batch
            else:
                one.left = going.state()  # by the limit of steps: there is more
        finally:
            going.close()
            one.going = None
            if self._pending:
                self._rollback.forget()  # a step that began before the end of a pass: there is no way back into that

    def step(self, *, samples: int | None = None, tokens: int | None = None, **metrics: Any) -> None:
        """One optimizer step is completed. Numbers given here (`loss=loss`) are kept with the next checkpoint.

        `samples`, `tokens`: how many it was, on all ranks, for what is told of the speed. `samples` is known without
        where a DataLoader says how large its batches are.
        """
        if self._lending.out:
            self._lending.take_back(metrics)
            self._enter()
            return
        self._pending = 0
        self._counting.step(samples, tokens)
        if self._first:
            self._first = False
            self._buckets = {name: buckets.known() for name, buckets in self._watched.items()}
        going = self._place.step_ended()
        if self._pace.step_ended() >= self._rollback.long_s:
            self._rollback.step_ended()
        elif self._rollback.possible:
            self._rollback.forget()
        if metrics:
            self.log(**metrics)
        if self._by_count:
            self._ask_for_due_save()
        if not going:
            self._at_boundary()

    def log(self, **metrics: Any) -> None:
        """Numbers to keep with the next checkpoint: `run.log(eval_loss=…)`. They are read when it is saved."""
        for name, value in metrics.items():
            if isinstance(value, torch.Tensor) and value.ndim == 0:
                self._metrics[name] = value.data  # detach() takes twice as long, and lets go of the interpreter lock
            elif isinstance(value, (int, float)):
                self._metrics[name] = value
            else:
                raise ConfigError(f"{name} is {type(value).__name__} and not one number")

    def evaluation(self, loader: Iterable[T]) -> Iterator[T]:
        """All batches of the loader. A stop in here is served here, and the whole evaluation runs after the resume."""
        self._at_boundary(tail=True)
        number = self._place.source(loader)
        source = self._place.sources[number]
        outer, self._evaluating = self._evaluating, (number, self._rng(), source.state())
        self._pace.interrupted()
        going = source.start()
        try:
            with self._session.reporter.tracker.pausing(EVALUATING):
                for batch in going:
                    self._at_boundary(self._boundaries.evaluation_step)
                    yield batch
                self._at_boundary(self._boundaries.evaluation_end)
        finally:
            going.close()
            self._evaluating = outer

    def finish(self) -> None:
        """Training is done: save the last step, marked as finished. A rerun then trains no more. `epochs` calls it."""
        if self._session.closed or self._finishing:
            return
        self._finishing = True
        if self._place.finished is not None:
            log.warning("already finished after %d steps: nothing to train", self.steps)
        else:
            self._boundaries.finish()
            if self.steps != self._session.last_saved:
                self._save(background=False)
            self._session.finish(self._asked)
            self._place.finished = self._asked
        self.close()

    def close(self) -> None:
        """Finish what is being saved, and hear no more signals."""
        self._session.close()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *trace: object) -> None:
        if error is not None:
            self._session.reporter.failed(error)
        self._session.close(together=kind is None)

    # Boundaries

    def _at_boundary(self, come: Any = None, *, tail: bool = False) -> None:
        """`tail`: what comes next belongs to the body of the loop over batches, after `step`."""
        if self._session.stopped is not None:
            raise self._session.stopped  # somebody has caught it
        (come or self._boundaries.step)()
        if not self._boundaries.has_request:
            return
        if self._boundaries.stop_requested:
            self._stop_here(tail)
        elif not self._pending and self._evaluating is None and not tail:
            self._session.save_beside(lambda: self._save(background=True))

    def _stop_here(self, tail: bool) -> None:
        if self._pending and (self._completing or not self._give_up_step()):
            self._completing = True
            return  # all ranks go on to the end of the step
        if self._evaluating is not None:
            number, rng, source = self._evaluating
            restore_rng(rng, self._generators)
            self._place.sources[number].restore(source)
        self._tail = (tail or self._evaluating is not None) and bool(self._place.going)
        stopped = self._session.stop(lambda time_limit: self._save(background=False, time_limit=time_limit))
        for one in self._place.sources:
            one.end_workers()
        process_exit.raise_or_exit(stopped)

    def _give_up_step(self) -> bool:
        """Is there no time to finish the step that is running? Then back to the one before. All ranks decide alike."""
        stop = self._session.stop_listener.stop
        left = stop.left() if stop is not None else None
        needed = self._checkpointer.seconds_for_save()
        late = left is not None and self._pace.rest_s() + (needed or 0.0) > left
        possible = self._rollback.possible and bool(self._place.going)
        told = self._session.ranks.agree("give up the step", lambda: [late, possible])
        if not (any(late for late, _ in told) and all(possible for _, possible in told)):
            return False
        log.warning("no time to finish the step that is running: back to step %d", self.steps)
        self._rollback.roll_back()
        return True

    def _ask_for_due_save(self, *, epoch_ended: bool = False) -> None:
        if self._checkpointer.schedule.due_at(self.steps, epoch_ended=epoch_ended):
            self._boundaries.save_is_due()

    def _done(self, count: int | None) -> bool:
        enough = self._steps_limit is not None and self._place.steps >= self._steps_limit
        return enough or (count is not None and self._place.epoch >= count)

    # Saving and resuming

    def _save(self, *, background: bool, time_limit: timedelta | None = None) -> None:
        loop = self._place.state(self._session.ranks.world_size)
        if self._evaluating is not None:
            number, _, source = self._evaluating
            loop["sources"][number] = source
        metrics = {name: float(value) for name, value in self._metrics.items()}
        loop |= {"tail": self._tail, "metrics": metrics}  # with the manifest go those of rank 0 alone
        loop["ddp"] = self._buckets
        self._session.save(
            epoch=self._place.epoch,
            metrics=metrics,
            values={"loop": loop},
            background=background,
            time_limit=time_limit,
        )
        self._pace.interrupted()

    def _resume(self) -> Restored | None:
        restored = self._checkpointer.restore()
        if restored is None:
            return None
        loop = restored.values.get("loop")
        if loop is None:
            raise StateMismatch(
                f"{restored.path} was not saved by reprieve.Run, and does not say where in the data the run was. "
                "Go on with Checkpointer, or start over with fresh=True"
            )
        self._reentry = self._rng()
        self._place.restore(loop, self._session.ranks.world_size)
        self._place.finished = restored.finished
        self._tail = loop["tail"]
        self._first = False
        self._buckets = loop["ddp"]
        for name, watched in self._watched.items():
            watched.take(self._buckets.get(name, ()))
        restore_rng(self._reentry, self._generators)
        return restored

    def _position(self) -> TrainingProgress:
        if self._metrics:
            self._session.reporter.tracker.metrics(self._metrics)
        epochs, steps = self._asked
        counted = self._counting
        return TrainingProgress(
            self._place.steps, steps, self._place.epochs_done(), epochs, counted.samples, counted.tokens
        )

    def _rng(self) -> dict[str, Any]:
        return capture_rng(self._generators)

    def _enter(self, *, active: bool = True) -> None:
        """The loop is where the interrupted process was: set-up code may have drawn random numbers since the restore.
        `active`: in a pass that was going on; not only behind one that was complete."""
        if self._reentry is not None:
            restore_rng(self._reentry, self._generators)
            if active or not self._place.resumed_passes:
                self._reentry = None
