"""A process that belongs to a framework is handed back to it, and takes its stop requests from it."""

from __future__ import annotations

import atexit
import signal
import sys
import threading
import time
from dataclasses import replace
from datetime import timedelta

import pytest

from reprieve import exit_codes
from reprieve.preemption import process_exit as module
from reprieve.preemption.deadline import Grace
from reprieve.preemption.process_exit import Preempted, ProcessExit
from reprieve.preemption.process_host import StopRequest, StopRequestListener
from reprieve.preemption.stop_listener import StopListener

SOON_S = 20.0
"""What a test waits for happens long before this."""


class FakeHost:
    """A `ProcessHost` that notes what happens to it."""

    def __init__(self) -> None:
        self.grace = Grace(timedelta(seconds=90), "of the host", certain=True)
        self.listeners: list[StopRequestListener] = []
        self.handed_back = threading.Event()
        self.stop: StopRequest | None = None

    def subscribe(self, listener: StopRequestListener) -> None:
        self.listeners.append(listener)
        if self.stop is not None:
            listener(self.stop)

    def unsubscribe(self, listener: StopRequestListener) -> None:
        self.listeners.remove(listener)

    def stopped(self, stopped: Preempted) -> None:
        self.has_stopped = stopped

    def hand_back(self) -> None:
        self.handed_back.set()

    def request(self, stop: StopRequest) -> None:
        self.stop = stop
        for listener in self.listeners:
            listener(stop)


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> FakeHost:
    """No test here may end this process."""

    def exited(code: int) -> None:
        raise AssertionError(f"the process would have ended with {code}")

    monkeypatch.setattr(module.os, "_exit", exited)
    return FakeHost()


@pytest.fixture
def hosted(host: FakeHost) -> ProcessExit:
    hosted = ProcessExit()
    hosted.host = host
    return hosted


def request(deadline_s: float | None = 30) -> StopRequest:
    now = time.monotonic()
    return StopRequest("a drained node", now, None if deadline_s is None else now + deadline_s, certain=True)


# The exit


def test_an_exit_hands_the_process_back(hosted: ProcessExit, host: FakeHost) -> None:
    hosted.exit_now()
    assert host.handed_back.is_set()


def test_a_scheduled_exit_hands_the_process_back_when_it_is_due(hosted: ProcessExit, host: FakeHost) -> None:
    hosted.schedule(0.2)
    assert not host.handed_back.is_set()
    assert host.handed_back.wait(SOON_S)


@pytest.mark.parametrize("code", [1, exit_codes.PERMANENT_FAILURE])
def test_a_failure_is_left_to_the_host(code: int, hosted: ProcessExit, host: FakeHost) -> None:
    hosted.schedule(0, code)
    time.sleep(0.2)
    assert not host.handed_back.is_set()


def test_no_hooks_are_installed(hosted: ProcessExit, monkeypatch: pytest.MonkeyPatch) -> None:
    registered: list[object] = []
    monkeypatch.setattr(atexit, "register", registered.append)
    before = sys.excepthook
    hosted.prepare()
    assert registered == [] and sys.excepthook is before


def test_a_stop_is_raised_on_whatever_thread(hosted: ProcessExit) -> None:
    stopped = Preempted("a drained node", step=7, saved=True)
    raised: list[BaseException] = []

    def train() -> None:
        try:
            hosted.raise_or_exit(stopped)
        except Preempted as error:
            raised.append(error)

    thread = threading.Thread(target=train)
    thread.start()
    thread.join(SOON_S)
    assert raised == [stopped]


# The stop listener


def test_requests_come_from_the_host(host: FakeHost) -> None:
    calls: list[str] = []
    stopped = threading.Event()
    before = signal.getsignal(signal.SIGTERM)
    listener = StopListener(
        stopped.set, on_request=lambda: calls.append("request"), grace=Grace(None, "own"), host=host
    )
    listener.start()
    assert listener.handles_signals and listener.grace is host.grace
    assert signal.getsignal(signal.SIGTERM) is before, "the signals are the host's"
    stop = request()
    host.request(stop)
    assert stopped.wait(SOON_S) and calls == ["request"]
    assert listener.stop is stop
    listener.close()
    assert host.listeners == []


def test_the_host_has_waited_already(host: FakeHost) -> None:
    stopped = threading.Event()
    listener = StopListener(stopped.set, grace=Grace(None, "own"), kill_wait=timedelta(hours=1), host=host)
    listener.start()
    host.request(request())
    assert stopped.wait(SOON_S)
    listener.close()


def test_a_request_before_the_start_is_not_lost(host: FakeHost) -> None:
    stopped = threading.Event()
    host.stop = request()
    listener = StopListener(stopped.set, grace=Grace(None, "own"), host=host)
    listener.start()
    assert stopped.wait(SOON_S) and listener.stop is host.stop
    listener.close()


def test_a_deadline_that_moves_closer_is_taken_over(host: FakeHost) -> None:
    calls: list[int] = []
    listener = StopListener(lambda: calls.append(1), grace=Grace(None, "own"), host=host)
    listener.start()
    stop = request(None)
    host.request(stop)
    host.request(replace(stop, deadline=stop.at + 5))
    assert listener.stop is not None and listener.stop.deadline == stop.at + 5
    assert listener.stop.reason == "a drained node"
    listener.close()
    listener._thread.join(SOON_S)
    assert calls == [1]


def test_the_hosts_own_signal_handler_is_not_called(host: FakeHost) -> None:
    listener = StopListener(lambda: None, grace=Grace(None, "own"), host=host)
    listener.start()
    host.request(replace(request(), signal=signal.SIGTERM))
    listener.call_previous_handler()
    listener.reassert_signals()
    listener.close()


def test_no_cloud_is_polled_in_a_hosted_process(host: FakeHost, monkeypatch: pytest.MonkeyPatch) -> None:
    def detect(notices: object) -> tuple[object, ...]:
        raise AssertionError("the host polls")

    monkeypatch.setattr("reprieve.preemption.stop_listener.detect_clouds", detect)
    StopListener(lambda: None, grace=Grace(None, "own"), notices=("aws",), host=host)
