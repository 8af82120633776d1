"""The contract of all sinks."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from reprieve.progress.publisher import Publisher
from reprieve.progress.sinks import kubeflow
from reprieve.progress.sinks.base import Sink
from reprieve.progress.snapshot import Checkpoints, Progress
from reprieve.progress.tracker import Tracker
from tests.support.progress_kit import ODD_NAME, ODD_NUMBERS, progress, wait_until
from tests.support.progress_rigs import BarRig, FileRig, HttpRig, KubeflowRig, Rig, TerminationRig

LAST = 424_242
"""A step number that is easy to find in any output."""

pytestmark = pytest.mark.usefixtures("patient")


@pytest.fixture(params=[FileRig, TerminationRig, HttpRig, KubeflowRig, BarRig])
def rig(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    monkeypatch.setattr(kubeflow, "_INTERVAL_S", 0.0)
    rig: Rig = request.param(tmp_path)
    yield rig
    rig.end()


def ended(**changes: Any) -> Progress:
    """The termination log only gets the end of a run."""
    return progress(**{"state": "stopped", "reason": "SIGTERM", "saved": True, "step": LAST, **changes})


def test_it_says_who_it_is(rig: Rig) -> None:
    assert rig.sink.name.isprintable()
    assert rig.sink.name
    assert 0 < rig.sink.every_s <= 10


def test_what_was_told_is_seen(rig: Rig) -> None:
    for step in (1, 2, 3):
        rig.sink.update(progress(step=step))
    rig.sink.update(ended())
    assert str(LAST) in rig.seen()
    rig.check(rig.seen())


def test_the_last_word_is_told(rig: Rig) -> None:
    rig.sink.update(progress(step=1))
    rig.sink.close(ended())
    assert str(LAST) in rig.seen()


def test_the_last_word_may_be_the_only_one(rig: Rig) -> None:
    rig.sink.close(ended())


@pytest.mark.parametrize("state", ["starting", "training", "evaluating", "saving", "stopped", "failed", "finished"])
def test_every_state(rig: Rig, state: str) -> None:
    rig.sink.update(progress(state=state))
    rig.sink.close(progress(state=state, step=LAST))
    rig.check(rig.seen())


def test_nothing_is_known(rig: Rig) -> None:
    rig.sink.update(Progress(at=0.0, state="failed"))
    rig.check(rig.seen())


def test_numbers_that_are_none(rig: Rig) -> None:
    rig.sink.update(ended(loss=math.nan, learning_rate=math.inf, train=ODD_NUMBERS, evaluation=ODD_NUMBERS))
    assert str(LAST) in rig.seen()
    rig.check(rig.seen())


def test_names_that_are_odd(rig: Rig) -> None:
    odd = {"train": {ODD_NAME: 1.0, "": 2.0}, "evaluation": {"[red]": 0.5}, "reason": ODD_NAME}
    rig.sink.update(ended(**odd, checkpoints=Checkpoints(latest="/größe 🚀/[bold]checkpoint\n-1")))
    assert str(LAST) in rig.seen()
    rig.check(rig.seen())


def test_a_thousand_metrics_with_long_names(rig: Rig) -> None:
    many = {f"{number} of many metrics, with a name that goes on and on": float(number) for number in range(1000)}
    rig.sink.update(ended(train=many, evaluation=many))
    assert str(LAST) in rig.seen()
    rig.check(rig.seen())


def test_a_failure_is_raised_and_the_next_call_tries_again(rig: Rig) -> None:
    rig.break_it()
    for _ in range(2):
        with pytest.raises(Exception, match=r"\w"):
            rig.sink.update(ended())
    rig.repair()
    rig.sink.update(ended())
    assert str(LAST) in rig.seen()


def test_a_failure_ends_nothing_and_is_said_once(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    rig.break_it()
    tracker = Tracker(total_steps=LAST)
    publisher = Publisher(tracker, [_Quick(rig.sink)]).start()
    for step in range(200):
        tracker.step(step)
    tracker.stopped("SIGTERM", saved=True)
    wait_until(lambda: caplog.records)
    publisher.close()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert rig.sink.name in caplog.text


def test_a_run_that_never_stands_still_is_always_told_as_a_whole(rig: Rig) -> None:
    tracker = Tracker(total_steps=LAST, saving=lambda: (tracker.at, tracker.at % 100 / 100))
    over = threading.Event()

    def train() -> None:
        step = 0
        while not over.is_set():
            step += 1
            tracker.step(step, step / 10)
            tracker.metrics({f"metric {step % 7}": step, "loss": 1 / step})
            tracker.saved(f"/c/checkpoint-{step}", step)
        tracker.step(LAST)
        tracker.stopped("SIGTERM", saved=True)

    training = threading.Thread(target=train)
    training.start()
    publisher = Publisher(tracker, [_Quick(rig.sink)]).start()
    for _ in range(200):
        with contextlib.suppress(FileNotFoundError):
            if content := rig.seen():
                rig.check(content)
    over.set()
    training.join()
    publisher.close()
    assert str(LAST) in rig.seen()


class _Quick:
    """As often as it can."""

    every_s = 0.0005

    def __init__(self, sink: Sink) -> None:
        self.name = sink.name
        self.update: Callable[[Progress], None] = sink.update
        self.close: Callable[[Progress], None] = sink.close
