"""Tracks the progress of a run on the training thread, and provides snapshots of it on any other.

    adapter → Tracker.step, .metrics, .pausing, .saved, … → snapshot() → Progress → sinks

`step` is called at every optimizer step, so it only stores numbers. A snapshot converts tensors to numbers.
"""

from __future__ import annotations

import contextlib
import math
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from reprieve.clock import Clock, SystemClock
from reprieve.progress.eta import remaining
from reprieve.progress.metrics import EVALUATION, TRAIN, by_origin, detached, named, plain
from reprieve.progress.snapshot import MAX_LISTED, Checkpoints, ListedCheckpoint, Progress
from reprieve.progress.throughput import ThroughputMeter
from reprieve.run_state import RunState


class Tracker:
    """The progress of one session, from a start or a resume to the end of the process."""

    def __init__(
        self,
        *,
        total_steps: int | None = None,
        total_epochs: float | None = None,
        resumed_from: int | None = None,
        run: str | None = None,
        restarts: int | None = None,
        checkpointing: bool = True,
        saving: Callable[[], tuple[int, float | None] | None] = lambda: None,
        clock: Clock | None = None,
    ) -> None:
        """`resumed_from`: the restored step. `checkpointing`: whether anything is saved before the end. `saving`:
        returns the step of the save in progress and its written fraction; it is called on any thread."""
        self._clock = clock or SystemClock()
        self._saving = saving
        self._meter = ThroughputMeter(self._clock.monotonic, resumed_from or 0)
        self._resumed_from = resumed_from
        self._run = run
        self._restarts = restarts
        self._epoch: float | None = None
        self.plan(total_steps, total_epochs)
        self._lock = threading.Lock()
        """Guards what several threads change. `step` takes no lock: it would wait for threads that take snapshots."""
        self._updated_at = self._clock.monotonic()
        self._train: Mapping[str, Any] = {}
        self._evaluation: Mapping[str, Any] = {}
        self._checkpoints = Checkpoints(enabled=checkpointing)
        self._doing: RunState | None = None
        self._end: tuple[RunState, str | None, bool | None] | None = None

    def plan(self, total_steps: int | None = None, total_epochs: float | None = None) -> None:
        """Set the totals, where they are known only later."""
        self._total_steps = total_steps if total_steps and total_steps > 0 else None
        # transformers sets sys.maxsize epochs for a training without an end.
        self._total_epochs = total_epochs if total_epochs and 0 < total_epochs < sys.maxsize else None

    # On the training thread

    @property
    def at(self) -> int:
        """The last step that was completed or restored."""
        return self._meter.current

    def step(self, step: int, epoch: float | None = None) -> None:
        """Set the number of completed optimizer steps and epochs."""
        self._meter.step(step)
        if epoch is not None:
            self._epoch = epoch

    def trained_on(self, samples: int | None = None, tokens: int | None = None) -> None:
        """Set the cumulative samples and tokens over all ranks, up to the next `step`. Only differences are reported,
        so the starting value does not matter."""
        if samples is not None:
            self._meter.samples = samples
        if tokens is not None:
            self._meter.tokens = tokens

    @contextlib.contextmanager
    def pausing(self, what: RunState, every: int | None = None) -> Iterator[None]:
        """Mark a pause of training: `RunState.EVALUATING` or `SAVING`. Its time is not step time. `every`: the number
        of steps between two such pauses, where that is known."""
        before, self._doing = self._doing, what
        self._mark_updated()
        began = self._meter.begin_interruption()
        try:
            yield
        finally:
            self._meter.end_interruption(what, began, every)
            self._doing = before
            self._mark_updated()

    # On any thread

    def metrics(self, metrics: Mapping[str, Any]) -> None:
        """Add logged values: numbers, NumPy scalars or tensors of one element. Names such as `eval_loss` mark values of
        an evaluation. A tensor on a GPU is read on another thread; pass numbers where CUDA graphs are captured."""
        train, evaluation = by_origin(detached(metrics))
        with self._lock:
            self._train = {**self._train, **train}
            self._evaluation = {**self._evaluation, **evaluation}
        self._mark_updated()

    def saved(self, path: object, size: int = 0, *, step: int = 0, took_s: float = 0.0) -> None:
        """Count a checkpoint that became durable now, after a save of `took_s` seconds."""
        with self._lock:
            before, at = self._checkpoints, self._clock.time()
            new = ListedCheckpoint(path=str(path), step=step, created_at=at - took_s, bytes=size)
            others = (each for each in before.listed if each.path != new.path)
            self._checkpoints = replace(
                before,
                latest=str(path),
                latest_bytes=size,
                latest_at=at,
                last_save_s=took_s,
                created=(before.created or 0) + 1,
                valid=None if before.valid is None else before.valid + 1,
                listed=(new, *others)[:MAX_LISTED],
            )
        self._mark_updated()

    def restored(self, path: object, size: int, at: float) -> None:
        """Set the newest checkpoint: the one that the run resumes from, saved `at`."""
        self._change(latest=str(path), latest_bytes=size, latest_at=at)

    def checkpoints(
        self,
        created: int | None = None,
        valid: int | None = None,
        enabled: bool | None = None,
        listed: Sequence[ListedCheckpoint] | None = None,
    ) -> None:
        """Set what is known of the checkpoints: at the start, and after retention has removed some. `enabled`: as
        `checkpointing` of the constructor, where that is known only later. `listed`: all of them."""
        if listed is not None:
            listed = tuple(sorted(listed, key=lambda each: -each.step)[:MAX_LISTED])
        known = {"created": created, "valid": valid, "enabled": enabled, "listed": listed}
        self._change(**{name: value for name, value in known.items() if value is not None})

    def stopped(self, reason: str, *, saved: bool) -> None:
        """End the run by a preemption or a pause. The next start resumes it."""
        self._set_end(RunState.STOPPED, reason, saved)

    def failed(self, reason: str) -> None:
        """End the run by a failure, unless it has ended already."""
        self._set_end(RunState.FAILED, reason)

    def finished(self) -> None:
        """End the run: training is complete."""
        self._set_end(RunState.FINISHED)

    @property
    def ended(self) -> bool:
        return self._end is not None

    def snapshot(self) -> Progress:
        """Return the current progress."""
        train, evaluation = self._numbers()
        step, epoch = self._meter.current, self._epoch
        if epoch is None:
            epoch = train.get("epoch")
        if epoch is not None and not math.isfinite(epoch):
            epoch = None
        state, reason, saved = self._end or (self._state(step), None, None)
        percent, eta_s = self._remaining(step, epoch, finished=state == RunState.FINISHED)
        samples_per_s, tokens_per_s = self._meter.rates()
        age_s = self._clock.monotonic() - max(self._meter.at, self._updated_at)
        return Progress(
            at=self._clock.time() - age_s,
            run=self._run,
            state=state,
            reason=reason,
            saved=saved,
            step=step,
            total_steps=self._total_steps,
            epoch=epoch,
            total_epochs=self._total_epochs,
            percent=percent,
            eta_s=eta_s,
            samples_per_s=samples_per_s,
            tokens_per_s=tokens_per_s,
            **named(TRAIN, train),
            **named(EVALUATION, evaluation),
            train=train,
            evaluation=evaluation,
            resumed_from=self._resumed_from,
            restarts=self._restarts,
            checkpoints=self._checkpoints_now(),
        )

    def eta_s(self) -> float | None:
        """Return the remaining seconds; None: unknown."""
        return self._remaining(self._meter.current, self._epoch, finished=False)[1]

    def _remaining(self, step: int, epoch: float | None, *, finished: bool) -> tuple[float | None, float | None]:
        return remaining(
            step=step,
            total_steps=self._total_steps,
            epoch=epoch,
            total_epochs=self._total_epochs,
            seconds_per_step=self._meter.seconds_per_step(),
            finished=finished,
        )

    def _checkpoints_now(self) -> Checkpoints:
        saving = self._saving()
        if saving is None:
            return self._checkpoints
        step, fraction = saving
        if fraction is not None:
            fraction = min(1.0, max(0.0, fraction))
        return replace(self._checkpoints, saving=step, saving_fraction=fraction)

    def _state(self, step: int) -> RunState:
        if self._doing is not None:
            return self._doing
        return RunState.TRAINING if step != (self._resumed_from or 0) else RunState.STARTING

    def _numbers(self) -> tuple[dict[str, float], dict[str, float]]:
        """Convert all values to numbers, each once. Not under the lock: reading a tensor waits for its GPU."""
        train, evaluation = self._train, self._evaluation
        train_read, evaluation_read = plain(train), plain(evaluation)
        with self._lock:
            if self._train is train:
                self._train = train_read
            if self._evaluation is evaluation:
                self._evaluation = evaluation_read
        return train_read, evaluation_read

    def _change(self, **facts: Any) -> None:
        with self._lock:
            self._checkpoints = replace(self._checkpoints, **facts)
        self._mark_updated()

    def _set_end(self, state: RunState, reason: str | None = None, saved: bool | None = None) -> None:
        """Keep the first end: later ones, during the teardown, are consequences of it."""
        with self._lock:
            if self._end is None:
                self._end = (state, reason, saved)
        self._mark_updated()

    def _mark_updated(self) -> None:
        self._updated_at = self._clock.monotonic()
