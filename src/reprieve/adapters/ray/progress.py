"""The progress of a run on Ray: rank 0 sends it to the controller, which publishes it and lives through restarts.

    rank 0: session ─► ForwardingSink ─► store ─► RunProgress (controller) ─► file, HTTP, Ray's metrics
            `ray.train.report` ──────────────────────────┘             └─► store ─► driver ─► launcher

A function that saves by itself has no session: its reports to Ray are its progress.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from reprieve.adapters.ray.config import ResolvedConfig
from reprieve.errors import ReprieveError
from reprieve.progress.metrics import plain
from reprieve.progress.publisher import Publisher
from reprieve.progress.sinks.factory import make_sinks
from reprieve.progress.sinks.termination_log import TerminationSink
from reprieve.progress.snapshot import Progress
from reprieve.progress.tracker import Tracker
from reprieve.ranks.store import Store
from reprieve.run_state import RunState
from reprieve.settings import resolve

log = logging.getLogger("reprieve")

PROGRESS = "progress"
"""The key of the latest progress, as JSON: in the store of a generation by rank 0, in that of the run by the
controller."""
_POLL_S = 0.5
STEP_NAMES = ("step", "global_step", "training_iteration", "epoch")
"""How reports name the step, by preference."""


def step_of(metrics: Mapping[str, Any]) -> int | None:
    """Return the step that a report names; None: it names none."""
    named = (_number(metrics[name]) for name in STEP_NAMES if name in metrics)
    return next((int(number) for number in named if number is not None), None)


def _number(value: Any) -> float | None:
    """Return a finite number of Python, NumPy or torch; None: it is something else."""
    if isinstance(value, bool | str) or str(getattr(value, "dtype", "")).endswith("bool"):
        return None
    number = plain({"": value}).get("")
    return number if number is not None and math.isfinite(number) else None


class ForwardingSink:
    """Sends the progress of a worker to the controller."""

    name = "the controller of Ray Train"
    every_s = _POLL_S

    def __init__(self, store: Store) -> None:
        self._store = store

    def update(self, progress: Progress) -> None:
        self._store.set(PROGRESS, progress.to_json())

    def close(self, progress: Progress) -> None:
        self.update(progress)


class RunProgress:
    """The progress of all generations of a run, in the controller: a `ProgressSource`."""

    def __init__(self, config: ResolvedConfig, store: Store) -> None:
        """`store`: of the run."""
        self._store = store
        self._generation = 0
        self._reports = 0
        self._from_reports = Tracker()
        self._received: Progress | None = None
        """What a session in rank 0 has sent."""
        self._committed: int | None = None
        """The step of the last checkpoint that Ray has committed."""
        self.resumed_from: int | None = None
        """The step of the checkpoint that Ray resumes from."""
        self._override: tuple[RunState, str | None] | None = None
        """What the controller knows better than rank 0: the run restarts, or has ended."""
        settings = resolve({}, config.environment)
        # A termination log belongs to the container of the driver.
        sinks = [each for each in make_sinks(settings, config.environment) if not isinstance(each, TerminationSink)]
        self._publisher = Publisher(self, [*sinks, RayMetrics(), ForwardingSink(store.client())]).start()
        threading.Thread(target=self._receive, name="reprieve ray progress", daemon=True).start()

    # In the hooks of the controller, which must not block

    def generation_started(self, number: int) -> None:
        if number > 1:
            self.resumed_from = self._committed if self._committed is not None else self.resumed_from
            self._override = (RunState.WAITING, None)
        self._generation = number

    def reported(self, metrics: Mapping[str, Any], checkpoint: str | None) -> None:
        """A report of all workers was processed. `checkpoint`: the path of the one that it committed."""
        self._reports += 1
        self._override = None
        step = step_of(metrics)
        step = self._reports if step is None else step
        self._from_reports.step(step, _number(metrics.get("epoch")))
        self._from_reports.metrics(metrics)
        if checkpoint is not None:
            self._committed = step
            self._from_reports.saved(checkpoint, step=step)

    def close(self, state: RunState, reason: str | None = None) -> None:
        """The run has ended. Publishes that."""
        self._override = (state, reason)
        self._publisher.close()

    # On any thread

    @property
    def ended(self) -> bool:
        return self._override is not None and self._override[0] in (
            RunState.STOPPED,
            RunState.FAILED,
            RunState.FINISHED,
        )

    def failed(self, reason: str) -> None:
        self._override = (RunState.FAILED, reason)

    def snapshot(self) -> Progress:
        progress = self._received or self._from_reports.snapshot()
        state, reason = self._override or (progress.state, progress.reason)
        if state in (RunState.STOPPED, RunState.FAILED) and not self.ended:
            state = RunState.WAITING  # the workers have stopped, and the controller restarts them
        return replace(
            progress,
            state=state,
            reason=reason,
            # A session saves beside Ray, and knows better what it has resumed from.
            resumed_from=progress.resumed_from if self._received is not None else self.resumed_from,
            restarts=max(0, self._generation - 1),
        )

    def _receive(self) -> None:
        store = self._store.client()
        with contextlib.suppress(ReprieveError):
            while not self.ended:
                data = store.get(f"{self._generation}/{PROGRESS}")
                if data is not None:
                    self._received = Progress.from_json(data)
                    self._override = None if not self.ended else self._override
                threading.Event().wait(_POLL_S)


class RayMetrics:
    """Gauges in Ray's own metrics: `ray_reprieve_step`, …"""

    name = "Ray's metrics"
    every_s = 5.0

    def __init__(self) -> None:
        from ray.util.metrics import Gauge

        described = {
            "reprieve_step": "Completed optimizer steps, or reports of the workers.",
            "reprieve_percent_complete": "How much of the training is done.",
            "reprieve_loss": "The last loss.",
            "reprieve_restarts": "How often the group of workers was restarted.",
            "reprieve_checkpoints_created": "Checkpoints that became durable.",
        }
        self._gauges = {name: Gauge(name, text) for name, text in described.items()}

    def update(self, progress: Progress) -> None:
        values = (progress.step, progress.percent, progress.loss, progress.restarts, progress.checkpoints.created)
        for gauge, value in zip(self._gauges.values(), values, strict=True):
            if value is not None:
                gauge.set(value)

    def close(self, progress: Progress) -> None:
        self.update(progress)
