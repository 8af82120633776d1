"""Sample progress, a job on a fake clock, and helpers to read what was published."""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Callable
from typing import Any

from reprieve.progress.snapshot import Checkpoints, Progress
from reprieve.progress.tracker import Tracker
from reprieve.run_state import RunState
from tests.support.helpers import FakeClock

AT = 1_700_000_000.0
ODD_NAME = 'größe 🚀 "quoted" back\\slash\nline {x} \udc80'
ODD_NUMBERS = {"nan": math.nan, "inf": math.inf, "minus": -math.inf, "tiny": 5e-324, "huge": 1.7e308, "whole": 7}


def progress(**changes: Any) -> Progress:
    """Progress of a run that is half done."""
    known: dict[str, Any] = {
        "at": AT, "state": RunState.TRAINING,
        "step": 150, "total_steps": 300, "epoch": 1.5, "total_epochs": 3, "percent": 50.0,
        "eta_s": 90.4, "loss": 0.45231, "learning_rate": 5e-5, "accuracy": 0.9, "validation_loss": 0.5,
        "validation_accuracy": 0.8, "gradient_norm": 1.25, "samples_per_s": 32.0, "tokens_per_s": 65_536.0,
        "resumed_from": 100, "restarts": 2,
        "train": {"loss": 0.45231, "learning_rate": 5e-5}, "evaluation": {"eval_loss": 0.5},
        "checkpoints": Checkpoints(
            latest="/workspace/checkpoints/checkpoint-150", latest_at=AT - 300, latest_bytes=18_500_000_000,
            created=3, valid=2,
        ),
    }  # fmt: skip
    return Progress(**{**known, **changes})


def strict_json(data: bytes | str) -> Any:
    """Parse JSON as strictly as other languages do: no NaN, no Infinity, no duplicate keys."""

    def refuse(what: str) -> None:
        raise AssertionError(f"{what} is no JSON")

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        assert len({key for key, _ in pairs}) == len(pairs)
        return dict(pairs)

    return json.loads(data, parse_constant=refuse, object_pairs_hook=once)


def wait_until(condition: Callable[[], object], limit_s: float = 10.0) -> None:
    ends = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < ends, "it did not come"
        time.sleep(0.002)


class FakeJob:
    """A job that trains, evaluates and saves on a fake clock."""

    def __init__(
        self, clock: FakeClock, tracker: Tracker, *, total: int, step_s: float, step: int = 0, first_s: float = 0.0,
        evaluation: tuple[int, float] = (0, 0.0), save: tuple[int, float] = (0, 0.0), says_when: bool = False,
        jitter: float = 0.0, slow: tuple[int, float] = (0, 1.0),
    ) -> None:  # fmt: skip
        """`evaluation`, `save`: after how many steps, and for how long. `first_s`: what the first step takes on top.
        `slow`: every n-th step takes so many times as long."""
        self.clock, self.tracker = clock, tracker
        self.step, self.total, self.step_s, self.first_s = step, total, step_s, first_s
        self.pauses = {RunState.EVALUATING: evaluation, RunState.SAVING: save}
        self.says_when, self.jitter, self.slow = says_when, jitter, slow
        self._random = random.Random(0)

    def one_step(self) -> None:
        took = self.step_s * (1 + self.jitter * self._random.uniform(-1, 1)) + self.first_s
        self.first_s = 0.0
        self.step += 1
        if self.slow[0] and self.step % self.slow[0] == 0:
            took *= self.slow[1]
        self.clock.advance(took)
        self.tracker.step(self.step)
        for what, (every, seconds) in self.pauses.items():
            if every and self.step % every == 0:
                with self.tracker.pausing(what, every if self.says_when else None):
                    self.clock.advance(seconds)

    def run_for(self, seconds: float) -> None:
        ends = self.clock.now + seconds
        while self.clock.now < ends:
            self.one_step()

    def seconds_to_the_end(self) -> float:
        began = self.clock.now
        while self.step < self.total:
            self.one_step()
        return self.clock.now - began
