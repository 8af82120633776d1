"""Publishing runs beside training: no sink delays training or its end."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from reprieve.progress import publisher as publishers
from reprieve.progress.publisher import Publisher
from reprieve.progress.snapshot import Progress
from reprieve.progress.tracker import Tracker
from tests.support.progress_kit import wait_until

CLOSE_S = publishers._CLOSE_TIMEOUT_S
pytestmark = pytest.mark.usefixtures("patient")


class Notes:
    """A sink that records its updates and their threads."""

    name = "the notes"

    def __init__(self, every_s: float = 0.001) -> None:
        self.every_s = every_s
        self.updates: list[Progress] = []
        self.closed: list[Progress] = []
        self.threads: set[int] = set()

    def update(self, progress: Progress) -> None:
        self.threads.add(threading.get_ident())
        self.updates.append(progress)

    def close(self, progress: Progress) -> None:
        self.threads.add(threading.get_ident())
        self.closed.append(progress)


class Broken(Notes):
    name = "the broken one"

    def update(self, progress: Progress) -> None:
        super().update(progress)
        raise ValueError(f"no step {progress.step}")

    def close(self, progress: Progress) -> None:
        super().close(progress)
        raise OSError(28, "No space left on device", "/x")


class Hanging(Notes):
    """A sink that hangs from its first call, or in its last."""

    name = "the hanging one"

    def __init__(self, at: str) -> None:
        super().__init__()
        self.at = at
        self.go = threading.Event()

    def update(self, progress: Progress) -> None:
        super().update(progress)
        if self.at == "update":
            self.go.wait(30)

    def close(self, progress: Progress) -> None:
        super().close(progress)
        if self.at == "close":
            self.go.wait(30)


def test_from_its_start_to_its_end() -> None:
    tracker, notes = Tracker(total_steps=10), Notes()
    publisher = Publisher(tracker, [notes]).start()
    wait_until(lambda: notes.updates)
    assert notes.updates[0].state == "starting"
    for step in range(1, 11):
        tracker.step(step)
    tracker.finished()
    publisher.close()
    assert [(update.step, update.state) for update in notes.closed] == [(10, "finished")]
    assert len(notes.threads) == 1
    assert threading.get_ident() not in notes.threads


def test_each_sink_as_often_as_it_wants() -> None:
    often, seldom = Notes(0.001), Notes(60.0)
    with Publisher(Tracker(), [often, seldom]):
        wait_until(lambda: len(often.updates) > 5)
    assert (len(seldom.updates), len(seldom.closed)) == (1, 1)


def test_a_run_that_just_ends_has_failed() -> None:
    notes = Notes()
    with Publisher(Tracker(), [notes]):
        pass
    assert (notes.closed[0].state, notes.closed[0].reason) == (
        "failed",
        "the process ended before training was finished",
    )


def test_a_stop_is_told() -> None:
    tracker, notes = Tracker(), Notes()
    with Publisher(tracker, [notes]):
        tracker.stopped("SIGTERM", saved=True)
    assert (notes.closed[0].state, notes.closed[0].saved) == ("stopped", True)


def test_a_sink_that_fails_is_said_once_and_called_again(caplog: pytest.LogCaptureFixture) -> None:
    broken, notes = Broken(), Notes()
    with Publisher(Tracker(), [broken, notes]):
        wait_until(lambda: len(broken.updates) > 5 and len(notes.updates) > 5)
    assert len(broken.closed) == len(notes.closed) == 1
    assert [record.getMessage() for record in caplog.records] == [
        "cannot publish progress to the broken one: no step 0. Training continues"
    ]


@pytest.mark.parametrize("at", ["update", "close"])
def test_a_sink_that_hangs_holds_up_nobody(at: str, caplog: pytest.LogCaptureFixture) -> None:
    hanging, notes = Hanging(at), Notes()
    tracker = Tracker()
    publisher = Publisher(tracker, [hanging, notes]).start()
    wait_until(lambda: hanging.updates and len(notes.updates) > 5)
    began = time.monotonic()
    for step in range(1000):
        tracker.step(step)
    trained = time.monotonic()
    publisher.close(CLOSE_S)
    ended = time.monotonic()
    hanging.go.set()
    assert trained - began < 0.5
    assert 0.9 < ended - trained < 1.9
    assert len(notes.closed) == 1, "the other one is told"
    assert "the hanging one does not respond: it did not get the end of the run" in caplog.text


def test_it_is_closed_once() -> None:
    notes = Notes()
    publisher = Publisher(Tracker(), [notes]).start()
    publisher.close()
    publisher.close()
    assert len(notes.closed) == 1


def test_one_that_was_not_started_can_be_closed() -> None:
    notes = Notes()
    Publisher(Tracker(), [notes]).close()
    assert notes.closed == []


def test_a_forked_child_tells_nothing() -> None:
    notes = Notes()
    publisher = Publisher(Tracker(), [notes]).start()
    wait_until(lambda: notes.updates)
    with publisher._feeds[0]._closing._cond:  # as a thread may have it at the moment of the fork
        if (child := os.fork()) == 0:
            signal.alarm(10)
            publisher.close()
            os._exit(len(notes.closed) or int(threading.active_count() > 1))
        assert os.waitpid(child, 0)[1] == 0
    publisher.close()
    assert notes.closed
