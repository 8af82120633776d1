"""Counts what there is to tell of a run, on the training thread, and says it to whoever asks, on any other.

    adapter → Tracker.step, .metrics, .pausing, .saved, … → snapshot() → Progress → sinks

`step` is called at every optimizer step, so it stores numbers and does nothing else. Tensors are turned into numbers
when a snapshot is made.
"""

from __future__ import annotations

import contextlib
import math
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from reprieve.clock import Clock, SystemClock
from reprieve.progress.eta import left
from reprieve.progress.metrics import EVALUATION, TRAIN, by_origin, detached, named, plain
from reprieve.progress.snapshot import Checkpoints, Progress
from reprieve.progress.throughput import ThroughputMeter
from reprieve.run_state import RunState


class Tracker:
    """Of one session: from a start or a resume to the end of the process."""

    def __init__(
        self,
        *,
        total_steps: int | None = None,
        total_epochs: float | None = None,
        resumed_from: int | None = None,
        restarts: int = 0,
        checkpointing: bool = True,
        saving: Callable[[], tuple[int, float | None] | None] = lambda: None,
        clock: Clock | None = None,
    ) -> None:
        """`resumed_from`: the step that was restored. `checkpointing`: is anything saved before the end? `saving`: the
        step of the save that is being written, and how much of it is; asked from any thread."""
        self._clock = clock or SystemClock()
        self._saving = saving
        self._pace = ThroughputMeter(self._clock.monotonic, resumed_from or 0)
        self._resumed_from = resumed_from
        self._restarts = restarts
        self._epoch: float | None = None
        self.plan(total_steps, total_epochs)
        self._lock = threading.Lock()
        """For what several threads change. `step` takes no lock: it would wait for whoever makes a snapshot."""
        self._touched = self._clock.monotonic()
        self._train: Mapping[str, Any] = {}
        self._evaluation: Mapping[str, Any] = {}
        self._checkpoints = Checkpoints(enabled=checkpointing)
        self._doing: RunState | None = None
        self._end: tuple[RunState, str | None, bool | None] | None = None

    def plan(self, total_steps: int | None = None, total_epochs: float | None = None) -> None:
        """How much there is to do, where that is known only later."""
        self._total_steps = total_steps if total_steps and total_steps > 0 else None
        # Without end, transformers trains for sys.maxsize epochs.
        self._total_epochs = total_epochs if total_epochs and 0 < total_epochs < sys.maxsize else None

    # On the training thread

    @property
    def at(self) -> int:
        """The last step that was told, or restored."""
        return self._pace.current

    def step(self, step: int, epoch: float | None = None) -> None:
        """So many optimizer steps are completed, and so many epochs."""
        self._pace.step(step)
        if epoch is not None:
            self._epoch = epoch

    def trained_on(self, samples: int | None = None, tokens: int | None = None) -> None:
        """So many of all ranks, up to the step that is told next. What was before this session may be in it or not: it
        is how they grow that is told."""
        if samples is not None:
            self._pace.samples = samples
        if tokens is not None:
            self._pace.tokens = tokens

    @contextlib.contextmanager
    def pausing(self, what: RunState, every: int | None = None) -> Iterator[None]:
        """While training stands still for something: `EVALUATING` or `SAVING`. Its time is not step time. `every`:
        after how many steps it comes again, where that is known."""
        before, self._doing = self._doing, what
        self._touch()
        began = self._pace.interrupted()
        try:
            yield
        finally:
            self._pace.went_on(what, began, every)
            self._doing = before
            self._touch()

    # On any thread

    def metrics(self, metrics: Mapping[str, Any]) -> None:
        """What was logged: numbers, NumPy scalars or tensors of one element. Some names say that it is of an evaluation
        (`eval_loss`). A tensor on a GPU is read on another thread; give numbers where CUDA graphs are captured."""
        train, evaluation = by_origin(detached(metrics))
        with self._lock:
            self._train = {**self._train, **train}
            self._evaluation = {**self._evaluation, **evaluation}
        self._touch()

    def saved(self, path: object, size: int | None = None, at: float | None = None) -> None:
        """One more checkpoint is durable, since `at`, in seconds since the epoch; default: now."""
        with self._lock:
            before = self._checkpoints
            self._checkpoints = replace(
                before,
                latest=str(path),
                latest_bytes=size,
                latest_at=self._clock.time() if at is None else at,
                created=before.created + 1,
                valid=None if before.valid is None else before.valid + 1,
            )
        self._touch()

    def restored(self, path: object, size: int, at: float) -> None:
        """The newest checkpoint is the one that the run goes on from, saved `at`."""
        self._change(latest=str(path), latest_bytes=size, latest_at=at)

    def checkpoints(self, created: int | None = None, valid: int | None = None, enabled: bool | None = None) -> None:
        """What is there: said at the start, and when retention has removed some. `enabled`: as `checkpointing` above,
        where that is known only later."""
        known = {"created": created, "valid": valid, "enabled": enabled}
        self._change(**{name: value for name, value in known.items() if value is not None})

    def stopped(self, reason: str, *, saved: bool) -> None:
        """By a preemption or a pause; the next start goes on."""
        self._ends(RunState.STOPPED, reason, saved)

    def failed(self, reason: str) -> None:
        self._ends(RunState.FAILED, reason)

    def finished(self) -> None:
        """There is nothing left to train."""
        self._ends(RunState.FINISHED)

    @property
    def ended(self) -> bool:
        return self._end is not None

    def snapshot(self) -> Progress:
        """All of it, now."""
        train, evaluation = self._numbers()
        step, epoch = self._pace.current, self._epoch
        if epoch is None:
            epoch = train.get("epoch")
        if epoch is not None and not math.isfinite(epoch):
            epoch = None
        state, reason, saved = self._end or (self._state(step), None, None)
        percent, eta_s = self._left(step, epoch, finished=state == RunState.FINISHED)
        samples_per_s, tokens_per_s = self._pace.rates()
        silent_s = self._clock.monotonic() - max(self._pace.at, self._touched)
        return Progress(
            at=self._clock.time() - silent_s,
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
        """How long the rest takes; None: nobody knows."""
        return self._left(self._pace.current, self._epoch, finished=False)[1]

    def _left(self, step: int, epoch: float | None, *, finished: bool) -> tuple[float | None, float | None]:
        return left(
            step=step,
            total_steps=self._total_steps,
            epoch=epoch,
            total_epochs=self._total_epochs,
            seconds_per_step=self._pace.seconds_per_step(),
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
        """Each value is read once. Not under the lock: to read a tensor is to wait for its GPU."""
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
        self._touch()

    def _ends(self, state: RunState, reason: str | None = None, saved: bool | None = None) -> None:
        """The first word holds: what is said while everything is torn down is a consequence."""
        with self._lock:
            if self._end is None:
                self._end = (state, reason, saved)
        self._touch()

    def _touch(self) -> None:
        self._touched = self._clock.monotonic()
