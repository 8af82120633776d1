"""The tracker: updated by the training thread, read by any other."""

from __future__ import annotations

import math
import sys
import threading
from pathlib import Path

import pytest

from reprieve.progress.snapshot import Checkpoints, ListedCheckpoint
from reprieve.progress.tracker import Tracker
from reprieve.run_state import RunState
from tests.support.helpers import FakeClock


@pytest.fixture
def tracker(clock: FakeClock) -> Tracker:
    return Tracker(clock=clock, total_steps=100, total_epochs=2, resumed_from=10, restarts=3)


def test_before_anything_happened(tracker: Tracker, clock: FakeClock) -> None:
    snapshot = tracker.snapshot()
    assert (snapshot.state, snapshot.step, snapshot.resumed_from, snapshot.restarts) == ("starting", 10, 10, 3)
    assert (snapshot.loss, snapshot.epoch, snapshot.samples_per_s, snapshot.eta_s) == (None, None, None, None)
    assert (snapshot.percent, snapshot.at) == (10.0, clock.now)
    assert snapshot.checkpoints == Checkpoints()
    assert not snapshot.ended


@pytest.mark.parametrize("nothing", [0, -1])
def test_a_total_that_is_none_is_not_known(clock: FakeClock, nothing: int) -> None:
    snapshot = Tracker(clock=clock, total_steps=nothing, total_epochs=nothing).snapshot()
    assert (snapshot.total_steps, snapshot.total_epochs, snapshot.percent) == (None, None, None)


@pytest.mark.parametrize("endless", [sys.maxsize, float(sys.maxsize), math.inf, math.nan])
def test_epochs_without_end_are_not_told(tracker: Tracker, endless: float) -> None:
    """Transformers sets sys.maxsize where data has no length."""
    tracker.plan(100, endless)
    snapshot = tracker.snapshot()
    assert (snapshot.total_steps, snapshot.total_epochs, snapshot.percent) == (100, None, 10.0)


def test_a_step(tracker: Tracker) -> None:
    tracker.step(11, epoch=0.22)
    snapshot = tracker.snapshot()
    assert (snapshot.state, snapshot.step, snapshot.epoch) == ("training", 11, 0.22)


def test_speed(tracker: Tracker, clock: FakeClock) -> None:
    for step in range(11, 41):
        clock.advance(0.5)
        tracker.trained_on(8 * step, 1000 * step)  # those before the resume are no speed
        tracker.step(step)
        if step % 10 == 0:
            with tracker.pausing(RunState.EVALUATING):
                clock.advance(60.0)
    snapshot = tracker.snapshot()
    assert snapshot.samples_per_s == pytest.approx(16.0, rel=0.05)
    assert snapshot.tokens_per_s == pytest.approx(2000.0, rel=0.05)


def test_what_nobody_counts_has_no_speed(tracker: Tracker, clock: FakeClock) -> None:
    for step in range(11, 21):
        clock.advance(0.5)
        tracker.trained_on(8 * step)
        tracker.step(step)
    snapshot = tracker.snapshot()
    assert (snapshot.samples_per_s, snapshot.tokens_per_s) == (pytest.approx(16.0), None)


# States


def test_what_training_stands_still_for(tracker: Tracker) -> None:
    tracker.step(11)
    with tracker.pausing(RunState.EVALUATING):
        assert tracker.snapshot().state == "evaluating"
        with tracker.pausing(RunState.SAVING):
            assert tracker.snapshot().state == "saving"
        assert tracker.snapshot().state == "evaluating"
    assert tracker.snapshot().state == "training"


def test_an_error_in_an_evaluation_ends_it(tracker: Tracker) -> None:
    tracker.step(11)
    with pytest.raises(ValueError, match="x"), tracker.pausing(RunState.EVALUATING):
        raise ValueError("x")
    assert tracker.snapshot().state == "training"


def test_a_stop(tracker: Tracker) -> None:
    tracker.step(50)
    tracker.stopped("SIGTERM", saved=True)
    tracker.finished()  # what a framework says when its loop is left
    snapshot = tracker.snapshot()
    assert (snapshot.state, snapshot.reason, snapshot.saved, snapshot.ended) == ("stopped", "SIGTERM", True, True)
    assert snapshot.percent == 50.0


def test_a_failure(tracker: Tracker) -> None:
    tracker.failed("out of memory")
    snapshot = tracker.snapshot()
    assert (snapshot.state, snapshot.reason, snapshot.ended) == ("failed", "out of memory", True)


def test_a_run_that_is_silent_does_not_look_fresh(tracker: Tracker, clock: FakeClock) -> None:
    clock.advance(5.0)
    tracker.step(11)
    updated_at = clock.now
    clock.advance(3600.0)
    assert tracker.snapshot().at == updated_at
    tracker.saved("checkpoint-11")
    assert tracker.snapshot().at == clock.now


# Checkpoints


def test_a_save_from_its_begin_to_its_end(clock: FakeClock) -> None:
    running: list[tuple[int, float | None]] = []
    tracker = Tracker(clock=clock, saving=lambda: running[0] if running else None)
    tracker.checkpoints(created=4, valid=2)
    running.append((20, 0.25))
    saves = tracker.snapshot().checkpoints
    assert (saves.saving, saves.saving_fraction, saves.created, saves.valid) == (20, 0.25, 4, 2)
    running.clear()
    tracker.saved(Path("/c/checkpoint-20"), 1_000, step=20, took_s=2.5)
    new = ListedCheckpoint(path="/c/checkpoint-20", step=20, created_at=clock.now - 2.5, bytes=1_000)
    assert tracker.snapshot().checkpoints == Checkpoints(
        latest="/c/checkpoint-20",
        latest_at=clock.now,
        latest_bytes=1_000,
        created=5,
        valid=3,
        last_save_s=2.5,
        listed=(new,),
    )
    tracker.checkpoints(valid=1)
    assert tracker.snapshot().checkpoints.valid == 1


def listed(*steps: int) -> list[ListedCheckpoint]:
    return [ListedCheckpoint(path=f"/c/checkpoint-{step}", step=step, created_at=0.0, bytes=1) for step in steps]


def test_twenty_checkpoints_are_listed_newest_first(tracker: Tracker) -> None:
    tracker.checkpoints(listed=listed(*range(30)))
    assert [each.step for each in tracker.snapshot().checkpoints.listed] == list(range(29, 9, -1))
    tracker.saved("/c/checkpoint-30", 1, step=30)
    assert [each.step for each in tracker.snapshot().checkpoints.listed] == list(range(30, 10, -1))


def test_a_checkpoint_that_is_replaced_is_listed_once(tracker: Tracker) -> None:
    tracker.checkpoints(listed=listed(1, 2))
    tracker.saved("/c/checkpoint-2", 5, step=2)
    assert [(each.step, each.bytes) for each in tracker.snapshot().checkpoints.listed] == [(2, 5), (1, 1)]


def test_the_newest_is_the_one_that_was_restored(tracker: Tracker) -> None:
    tracker.restored(Path("/c/checkpoint-10"), 500, 1_600_000_000.0)
    assert tracker.snapshot().checkpoints == Checkpoints(
        latest="/c/checkpoint-10", latest_at=1_600_000_000.0, latest_bytes=500
    )


@pytest.mark.parametrize(("given", "expected"), [(-0.1, 0.0), (1.2, 1.0), (math.nan, 0.0), (None, None)])
def test_a_part_is_between_none_and_all(given: float | None, expected: float | None) -> None:
    saves = Tracker(saving=lambda: (20, given)).snapshot().checkpoints
    assert (saves.saving, saves.saving_fraction) == (20, expected)


def test_two_saves_at_the_same_moment_are_two() -> None:
    second_ended = threading.Event()

    class Slow(FakeClock):
        """The first who asks waits for the second, as long as it does not hold it up."""

        asked = False

        def time(self) -> float:
            if not self.asked:
                self.asked = True
                second.start()
                second_ended.wait(0.2)
            return super().time()

    def save() -> None:
        tracker.saved("b")
        second_ended.set()

    second = threading.Thread(target=save)
    tracker = Tracker(clock=Slow())
    tracker.saved("a")
    second.join()
    assert tracker.snapshot().checkpoints.created == 2


def test_all_threads_at_once(tracker: Tracker) -> None:
    """Every save is counted, and no snapshot is older than the one before."""
    over = threading.Event()
    seen: list[int] = []

    def ask() -> None:
        while not over.is_set():
            seen.append(tracker.snapshot().step)

    def save() -> None:
        for number in range(500):
            tracker.saved(f"checkpoint-{number}")

    asking, saving = threading.Thread(target=ask), [threading.Thread(target=save) for _ in range(3)]
    for thread in (asking, *saving):
        thread.start()
    for step in range(11, 20_000):
        tracker.step(step, step / 100)
        tracker.metrics({"loss": 1 / step})
    for thread in saving:
        thread.join()
    over.set()
    asking.join()
    assert tracker.snapshot().checkpoints.created == 1500
    assert seen == sorted(seen)
