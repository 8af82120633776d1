"""`reprieve.Run`: a plain PyTorch loop that can be stopped at any moment and resumes exactly there.

    run.epochs → run.batches → (a step) → run.step → … → run.evaluation → …

Everything happens at boundaries (`session/boundaries.py`): before each fetch of a batch, before and in each evaluation,
after each epoch. Only there is the run saved or stopped; between two boundaries only `step` runs, which counts. So code
in the loop after `run.step()` (a log line, an evaluation) has run before that step is saved.
"""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch

from reprieve.adapters.loop.adapter import LoopAdapter, RunningEvaluation
from reprieve.adapters.loop.loop_state import LoopState
from reprieve.adapters.loop.rollback import Rollback
from reprieve.adapters.loop.sample_counter import batch_sizes
from reprieve.checkpoint.checkpointer import Checkpointer
from reprieve.checkpoint.results import Restored
from reprieve.checkpoint.schedule import Every
from reprieve.clock import Clock
from reprieve.errors import ConfigError, StateMismatch
from reprieve.preemption.process_exit import process_exit
from reprieve.ranks.group import LIMIT, Ranks
from reprieve.rng import capture_rng, restore_rng
from reprieve.run_state import RunState
from reprieve.session import ddp_buckets
from reprieve.session.session import Session
from reprieve.session.startup_errors import reporting_startup_errors
from reprieve.settings import resolve
from reprieve.storage.disk import Disk

log = logging.getLogger("reprieve")

T = TypeVar("T")


class Run:
    """A training run that is saved in the background, stopped by a signal, and resumed where it was.

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

    `grace_period`: the time from the stop request to the kill, "2m" or seconds. Default: `REPRIEVE_GRACE`, else the
        platform's.
    `kill_wait`: how long to keep training after a stop request before saving.
    `signals`: the signals that stop the run.
    `notices`: the clouds whose notices stop it: "auto" (the cloud that this machine is in), "off", "aws", ….
    `exit_wait`: how long the script may still run after the stop before the process is ended.
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
        take_over_after: str | float | timedelta | None = None,
        rank_timeout: str | float | timedelta = LIMIT,
        ranks: Ranks | None = None,
        disk: Disk | None = None,
        clock: Clock | None = None,
        **state: object,
    ) -> None:
        given = {"checkpoints": uri and os.fspath(uri), "every": every, "keep": keep, "name": name, "fresh": fresh}
        with reporting_startup_errors():
            settings = resolve({**given, "kill_wait": kill_wait, "take_over": take_over_after}, options=False)
            if settings.checkpoints is None:
                raise ConfigError("no folder for checkpoints: pass one, Run('checkpoints', …), or set CHECKPOINT_URI")
        self._generators = {name: value for name, value in state.items() if isinstance(value, torch.Generator)}
        modules = {name: value for name, value in state.items() if isinstance(value, torch.nn.Module)}
        self._adapter = adapter = LoopAdapter(self._generators)
        # Used at every step: one lookup less.
        self._loop, self._reentry = adapter.loop, adapter.reentry
        self._counter, self._timer, self._metrics = adapter.counter, adapter.timer, adapter.metrics
        self._session = session = Session(
            settings,
            adapter=adapter,
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
        )
        try:
            self._counter.world_size = session.ranks.world_size
            self._boundaries = session.boundaries
            self._checkpointer = session.checkpointer
            self._bucket_watchers = ddp_buckets.watch(modules)
            self._is_first_step = True
            """The order of DDP's buckets is unknown before the first step."""
            self._saves_by_count = self._checkpointer.schedule.by_count
            self._rollback = Rollback(modules, session.stop_listener.grace.period)
            self._finishing = self._completing = False
            self._pending = 0
            """Batches that were handed out since the last completed step."""
            self._steps_limit: int | None = None
            self.resumed = self._resume()
            """The checkpoint that the run resumed from; None: the run started from the beginning."""
            session.restored(self.resumed)
            session.restored_all()
        except BaseException as error:
            session.refused(error)
            raise

    # Where the run is

    @property
    def steps(self) -> int:
        """Completed optimizer steps, including those before a resume."""
        return self._loop.steps

    @property
    def epoch(self) -> int:
        """The current epoch, from 0."""
        return self._loop.epoch

    @property
    def batch(self) -> int:
        """Batches of this pass that were handed out, including those before a resume. For gradient accumulation:
        `if run.batch % 4 == 0: optimizer.step(); …; run.step()`."""
        open_passes = self._loop.open_passes
        return open_passes[-1].batch if open_passes else 0

    @property
    def finished(self) -> bool:
        """Whether nothing is left to train. For loops that do not use `epochs`."""
        return self._loop.finished is not None

    @property
    def checkpointer(self) -> Checkpointer:
        """The engine: lists the checkpoints (`checkpoints`) and verifies them (`verify`)."""
        return self._checkpointer

    # The loop

    def epochs(self, count: int | None = None, *, steps: int | None = None) -> Iterator[int]:
        """Yield the remaining epochs, up to `count` in all or until `steps` steps are done. Then finish the run."""
        if count is None and steps is None:
            raise ConfigError("epochs() needs a number of epochs, epochs(3), or of steps, epochs(steps=10_000)")
        loop, reentry = self._loop, self._reentry
        self._steps_limit = steps
        if loop.finished is not None and loop.finished != [count, steps] and not self._is_done(count):
            log.warning("the run was finished after %d steps, and continues: more is requested now", self.steps)
            loop.finished = None
        self._adapter.target = [count, steps]
        while loop.finished is None and not self._is_done(count):
            reentry.enter_epoch()
            yield loop.epoch
            if self._is_done(None):
                break
            loop.next_epoch()
            reentry.leave_epoch()
            self._request_due_save(epoch_ended=True)
            self._at_boundary()
        self.finish()

    def batches(self, loader: Iterable[T]) -> Iterator[T]:
        """Yield the batches of one pass over the loader: from the first or, after a resume, from the run's position."""
        loop, reentry, counter = self._loop, self._reentry, self._counter
        index = loop.source_index(loader)
        data_pass = loop.begin_pass(index)
        start = None
        if (resumed := reentry.next_pass()) is not None:
            if (start := resumed.state) is None:
                return  # complete before the resume
            data_pass.batch = data_pass.completed = resumed.batch
            if reentry.tail:
                yield from reentry.lend_batch(data_pass, start)
        sizes = batch_sizes(loader, counter.world_size)
        data_pass.iterator = iterator = loop.sources[index].start(start, before_first_fetch=reentry.enter)
        try:
            while self._steps_limit is None or not self._is_done(None):
                self._at_boundary()
                try:
                    batch = next(iterator)
                except StopIteration:
                    break
                data_pass.batch += 1
                self._pending += 1
                counter.pending += sizes.of(data_pass.batch)
                yield batch
            else:
                data_pass.left_at = iterator.state()  # the limit of steps is reached, and the pass has more
        finally:
            iterator.close()
            data_pass.iterator = None
            if self._pending:
                self._rollback.forget()  # the running step began in this pass, which cannot be entered again

    def step(self, *, samples: int | None = None, tokens: int | None = None, **metrics: Any) -> None:
        """Count a completed optimizer step. Numbers given here (`loss=loss`) are stored with the next checkpoint.

        `samples`, `tokens`: how many the step trained on, on all ranks, for the reported throughput. A DataLoader with
        a batch size makes `samples` unnecessary.
        """
        if self._reentry.batch_is_lent:
            self._reentry.take_back(self._checkpointer.restore(), metrics)
            return
        self._pending = 0
        self._counter.step(samples, tokens)
        if self._is_first_step:
            self._is_first_step = False
            self._adapter.bucket_orders = {name: watch.known() for name, watch in self._bucket_watchers.items()}
        has_open_pass = self._loop.step_ended()
        if self._timer.step_ended() >= self._rollback.long_s:
            self._rollback.step_ended()
        elif self._rollback.possible:
            self._rollback.forget()
        if metrics:
            self.log(**metrics)
        if self._saves_by_count:
            self._request_due_save()
        if not has_open_pass:
            self._at_boundary()

    def log(self, **metrics: Any) -> None:
        """Store numbers with the next checkpoint: `run.log(eval_loss=…)`. Tensors are read when it is saved."""
        for name, value in metrics.items():
            if isinstance(value, torch.Tensor) and value.ndim == 0:
                self._metrics[name] = value.data  # detach() takes twice as long, and releases the GIL
            elif isinstance(value, (int, float)):
                self._metrics[name] = value
            else:
                raise ConfigError(f"{name} is {type(value).__name__} and not one number")

    def evaluation(self, loader: Iterable[T]) -> Iterator[T]:
        """Yield all batches of the loader. A stop during an evaluation takes effect immediately; the evaluation is
        rerun after resuming."""
        adapter = self._adapter
        self._at_boundary(in_tail=True)
        index = self._loop.source_index(loader)
        source = self._loop.sources[index]
        outer, adapter.evaluation = adapter.evaluation, RunningEvaluation(index, source.state(), self._capture_rng())
        self._timer.interrupted()
        iterator = source.start()
        try:
            with self._session.reporter.tracker.pausing(RunState.EVALUATING):
                for batch in iterator:
                    self._at_boundary(self._boundaries.evaluation_step)
                    yield batch
                self._at_boundary(self._boundaries.evaluation_end)
        finally:
            iterator.close()
            adapter.evaluation = outer

    def finish(self) -> None:
        """Save the last step and mark the run as finished, so that a rerun does not train. `epochs` calls it."""
        if self._session.closed or self._finishing:
            return
        self._finishing = True
        if self._loop.finished is not None:
            log.warning("already finished after %d steps: nothing to train", self.steps)
        else:
            self._boundaries.finish()
            if self.steps != self._session.last_saved:
                self._session.save(background=False)
            self._session.finish(self._adapter.target)
            self._loop.finished = self._adapter.target
        self.close()

    def close(self) -> None:
        """Finish the running save and stop listening for signals."""
        self._session.close()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *trace: object) -> None:
        if error is not None:
            self._session.reporter.failed(error)
        self._session.close(together=kind is None)

    # Boundaries

    def _at_boundary(self, arrive: Callable[[], None] | None = None, *, in_tail: bool = False) -> None:
        """Save or stop if that is requested. `in_tail`: the body of the loop over batches continues, after `step`."""
        if self._session.stopped is not None:
            raise self._session.stopped  # the script caught it
        (arrive or self._boundaries.step)()
        if not self._boundaries.has_request:
            return
        if self._boundaries.stop_requested:
            self._stop_here(in_tail)
        elif not self._pending and self._adapter.evaluation is None and not in_tail:
            self._session.save_periodically()

    def _stop_here(self, in_tail: bool) -> None:
        if self._pending and (self._completing or not self._give_up_step()):
            self._completing = True
            return  # all ranks continue to the end of the step
        evaluation = self._adapter.evaluation
        if evaluation is not None:
            restore_rng(evaluation.rng, self._generators)
            self._loop.sources[evaluation.source].restore(evaluation.source_state)
        self._reentry.tail = (in_tail or evaluation is not None) and bool(self._loop.open_passes)
        stopped = self._session.stop()
        for source in self._loop.sources:
            source.end_workers()
        process_exit.raise_or_exit(stopped)

    def _give_up_step(self) -> bool:
        """Roll back to the last completed step if there is no time to finish the running one. All ranks agree on it."""
        stop = self._session.stop_listener.stop
        remaining_s = stop.remaining_s() if stop is not None else None
        save_s = self._checkpointer.seconds_for_save() or 0.0
        is_late = remaining_s is not None and self._timer.remaining_s() + save_s > remaining_s
        can_roll_back = self._rollback.possible and bool(self._loop.open_passes)
        votes = self._session.ranks.agree("give up the step", lambda: [is_late, can_roll_back])
        if not (any(late for late, _ in votes) and all(possible for _, possible in votes)):
            return False
        log.warning("no time to finish the running step: back to step %d", self.steps)
        self._rollback.roll_back()
        return True

    def _request_due_save(self, *, epoch_ended: bool = False) -> None:
        if self._checkpointer.schedule.due_by_count(self.steps, epoch_ended=epoch_ended):
            self._boundaries.save_is_due()

    def _is_done(self, epochs: int | None) -> bool:
        reached_limit = self._steps_limit is not None and self._loop.steps >= self._steps_limit
        return reached_limit or (epochs is not None and self._loop.epoch >= epochs)

    # Resuming

    def _resume(self) -> Restored | None:
        restored = self._checkpointer.restore()
        if restored is None:
            return None
        if (stored := restored.values.get("loop")) is None:
            raise StateMismatch(
                f"{restored.path} was not saved by reprieve.Run, so the position in the data is unknown. Resume it "
                "with Checkpointer, or start over with fresh=True"
            )
        state = LoopState.from_state(stored).for_world_size(self._session.ranks.world_size)
        self._reentry.begin(state)
        self._loop.restore(state)
        self._loop.finished = restored.finished
        self._is_first_step = False
        self._adapter.bucket_orders = state.ddp
        for name, watcher in self._bucket_watchers.items():
            watcher.take(state.ddp.get(name, ()))
        self._reentry.restore_rng()
        return restored

    def _capture_rng(self) -> dict[str, Any]:
        return capture_rng(self._generators)
