"""Logged values: converted late, once, and not on the training thread."""

from __future__ import annotations

import gc
import math
import threading
import weakref
from typing import Any

import numpy as np
import pytest
import torch

from reprieve.progress.tracker import Tracker
from tests.support.helpers import FakeClock


@pytest.fixture
def tracker(clock: FakeClock) -> Tracker:
    return Tracker(clock=clock, total_steps=100)


@pytest.mark.parametrize(
    ("logged", "name", "value"),
    [
        ({"loss": 0.5, "train_loss": 9.0}, "loss", 0.5),
        ({"train_loss": 0.5}, "loss", 0.5),
        ({"learning_rate": 5e-5}, "learning_rate", 5e-5),
        ({"grad_norm": torch.tensor(2.5)}, "gradient_norm", 2.5),
        ({"mean_token_accuracy": np.float32(0.75)}, "accuracy", 0.75),
        ({"accuracy": 0.5, "mean_token_accuracy": 0.75}, "accuracy", 0.5),
        ({"epoch": 1.25}, "epoch", 1.25),
    ],
)
def test_names_of_training(tracker: Tracker, logged: dict[str, Any], name: str, value: float) -> None:
    tracker.metrics(logged)
    assert getattr(tracker.snapshot(), name) == value


@pytest.mark.parametrize(
    ("found", "name"),
    [
        ({"eval_loss": 0.5}, "validation_loss"),
        ({"val_loss": 0.5, "loss": 9.0}, "validation_loss"),
        ({"eval_accuracy": 0.5}, "validation_accuracy"),
        ({"eval_mean_token_accuracy": 0.5}, "validation_accuracy"),
    ],
)
def test_names_of_an_evaluation(tracker: Tracker, found: dict[str, Any], name: str) -> None:
    tracker.metrics(found)
    snapshot = tracker.snapshot()
    assert getattr(snapshot, name) == 0.5
    assert snapshot.loss == found.get("loss")
    assert snapshot.evaluation == {key: value for key, value in found.items() if key != "loss"}


def test_everything_that_was_logged_is_kept_as_plain_numbers(tracker: Tracker) -> None:
    tracker.metrics({
        "loss": torch.tensor(0.5, requires_grad=True), "half": torch.tensor(0.25, dtype=torch.bfloat16),
        "numpy": np.float64(2.0), "whole": 7, "truth": True, "nan": math.nan, "infinite": -math.inf,
        "text": "high", "several": torch.ones(3), "nothing": None, "object": object(), "beyond": 10**400,
    })  # fmt: skip
    tracker.metrics({"later": 1.0})
    train = tracker.snapshot().train
    assert {type(value) for value in train.values()} <= {int, float}
    assert math.isnan(train.pop("nan"))  # type: ignore[attr-defined]
    assert train == {
        "loss": 0.5, "half": 0.25, "numpy": 2.0, "whole": 7, "truth": 1.0, "infinite": -math.inf, "later": 1.0,
    }  # fmt: skip


class Costly:
    def __init__(self) -> None:
        self.read = 0

    def __float__(self) -> float:
        self.read += 1
        return 0.5


def test_a_value_is_read_when_somebody_asks_and_only_once(tracker: Tracker) -> None:
    loss = Costly()
    tracker.metrics({"loss": loss})
    assert loss.read == 0
    assert tracker.snapshot().loss == tracker.snapshot().loss == 0.5
    assert loss.read == 1


def test_a_value_that_takes_long_to_read_holds_nothing_up(tracker: Tracker) -> None:
    """A tensor on a busy GPU."""
    reading, go = threading.Event(), threading.Event()

    class Slow:
        def __float__(self) -> float:
            reading.set()
            assert go.wait(10)
            return 0.5

    tracker.metrics({"loss": Slow()})
    snapshot: list[Any] = []
    asking = threading.Thread(target=lambda: snapshot.append(tracker.snapshot()))
    asking.start()
    assert reading.wait(10)
    tracker.step(11)
    tracker.metrics({"loss": 0.25})  # would wait for ever
    tracker.saved("a")
    go.set()
    asking.join()
    assert snapshot[0].loss == 0.5
    assert tracker.snapshot().loss == 0.25, "what was read late does not replace what came since"


def test_a_loss_does_not_keep_its_graph(tracker: Tracker) -> None:
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, activations: Costly) -> torch.Tensor:
            ctx.activations = activations
            return 2 * x

    activations = Costly()
    kept = weakref.ref(activations)
    loss = Doubled.apply(torch.tensor(1.0, requires_grad=True), activations)
    tracker.metrics({"loss": loss})
    del loss, activations
    gc.collect()
    assert kept() is None
    assert tracker.snapshot().loss == 2.0
