"""A worker from the stop request to the moment when it is handed back. Without a cluster."""

from __future__ import annotations

import gc
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from reprieve.adapters.ray import internals, worker
from reprieve.adapters.ray.config import JITCheckpointConfig, resolve_config
from reprieve.adapters.ray.internals import WorkerContext
from reprieve.adapters.ray.messages import DRIVER_STOP, PARKED, DriverStop
from reprieve.adapters.ray.worker import RayWorker
from reprieve.preemption.process_exit import Preempted, ProcessExit
from reprieve.preemption.process_host import StopRequest
from tests.support.memory_store import MemoryStore

SOON_S = 20.0


class FakePreemption:
    """What the worker tells Ray's controller."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.released = threading.Event()

    def hold(self) -> None:
        self.calls.append("hold")

    def release(self) -> None:
        self.calls.append("release")
        self.released.set()


class Lab:
    """A worker of a world of one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
        self.preemption = FakePreemption()
        context = WorkerContext(rank=0, world_size=1, local_rank=0, run_name="run", folder=None)
        monkeypatch.setattr(internals, "worker_context", lambda: context)
        install = SimpleNamespace(install=lambda on_drain: self.preemption)
        monkeypatch.setattr(internals, "HeldPreemption", install)
        monkeypatch.setattr(internals, "wrap_train_function", lambda wrapper: None)
        monkeypatch.setattr(internals, "replace_report", lambda wrapper: None)
        self.store = MemoryStore()
        config = resolve_config(JITCheckpointConfig(enabled=True, **options), {})
        self.worker = RayWorker(config, self.store, self.store.client())
        self.worker.start()
        # One for this worker: what it schedules outlives the test, and must not end this process.
        process_exit = ProcessExit()
        process_exit.host = self.worker
        monkeypatch.setattr(worker, "process_exit", process_exit)

    def request(self, number: int | None = None, *, deadline_s: float | None = None) -> None:
        deadline = None if deadline_s is None else time.monotonic() + deadline_s
        self.worker._stop_listener.request("SIGTERM", number=number, deadline=deadline)

    def stopped(self) -> StopRequest:
        end = time.monotonic() + SOON_S
        while self.worker.stop is None:
            assert time.monotonic() < end, "the stop was not passed on"
            time.sleep(0.01)
        return self.worker.stop

    def parked(self) -> int:
        return int(self.store.get(PARKED) or 0)

    def run(self, function: Callable[[], Any]) -> threading.Thread:
        """Run the training function as Ray does it, in a thread."""
        thread = threading.Thread(target=self.worker._guarded(function), daemon=True)
        thread.start()
        return thread


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Lab]]:
    labs: list[Lab] = []

    def make(**options: Any) -> Lab:
        labs.append(Lab(monkeypatch, **options))
        return labs[-1]

    yield make
    for lab in labs:
        lab.worker.close()


def test_a_signal_holds_the_controller_at_once_and_saves_after_kill_wait(
    make: Callable[..., Lab], caplog: pytest.LogCaptureFixture
) -> None:
    lab = make(kill_wait=0.5)
    began = time.monotonic()
    lab.request(15)
    while not lab.preemption.calls:
        time.sleep(0.01)
    assert lab.worker.stop is None
    lab.stopped()
    assert time.monotonic() - began >= 0.5
    assert "SIGTERM received, initiating JIT checkpoint in 0.5s" in caplog.messages
    assert lab.preemption.calls == ["hold"]


def test_a_deadline_cuts_kill_wait_short(make: Callable[..., Lab], caplog: pytest.LogCaptureFixture) -> None:
    lab = make(kill_wait=60)
    lab.request(15, deadline_s=4)
    remaining_s = lab.stopped().remaining_s()
    assert remaining_s is not None and remaining_s > 0.5, "no time is left to save"
    assert "kill_wait is cut short to 2.0 s" in caplog.text


def test_a_drained_node_does_not_wait(make: Callable[..., Lab]) -> None:
    lab = make(kill_wait=3600)
    lab.worker._drained(None)
    assert lab.stopped().reason == "a node of the run is drained"


def test_the_deadline_of_a_drain_is_taken_over(make: Callable[..., Lab]) -> None:
    lab = make()
    lab.worker._drained(time.time() + 60)
    stop = lab.stopped()
    remaining_s = stop.remaining_s()
    assert stop.certain and remaining_s is not None and 50 < remaining_s <= 60


def test_a_deadline_in_the_past_is_none(make: Callable[..., Lab]) -> None:
    """The node still runs."""
    lab = make()
    lab.worker._drained(time.time() - 5)
    assert lab.stopped().deadline is None


def test_a_driver_stop_ends_kill_wait(make: Callable[..., Lab]) -> None:
    lab = make(kill_wait=3600)
    lab.request(15)
    lab.store.client().set(DRIVER_STOP, DriverStop(reason="SIGTERM", deadline=None).to_json())
    lab.stopped()


def test_a_session_gets_the_request_also_when_it_comes_later(make: Callable[..., Lab]) -> None:
    lab = make()
    first: list[StopRequest] = []
    lab.worker.subscribe(first.append)
    assert lab.worker.has_session
    lab.worker._drained(None)
    stop = lab.stopped()
    later: list[StopRequest] = []
    lab.worker.subscribe(later.append)
    assert later == [stop]
    end = time.monotonic() + SOON_S
    while not first:
        assert time.monotonic() < end
        time.sleep(0.01)
    lab.worker.unsubscribe(first.append)


# Above the training function


def test_a_stop_parks_the_thread_frees_the_model_and_hands_the_process_back(
    make: Callable[..., Lab], caplog: pytest.LogCaptureFixture
) -> None:
    lab = make()
    held: list[weakref.ref[Any]] = []
    cleaned: list[str] = []

    class Model:
        pass

    def train() -> None:
        model = Model()
        held.append(weakref.ref(model))
        try:
            raise Preempted("SIGTERM", step=7, saved=True, checkpoint="/run/checkpoint-7")
        finally:
            cleaned.append("finally ran")

    thread = lab.run(train)
    assert lab.preemption.released.wait(SOON_S)
    assert thread.is_alive() and cleaned == ["finally ran"] and lab.parked() == 1
    gc.collect()
    assert held[0]() is None, "the model is kept alive"
    assert any(
        re.fullmatch(r"JIT checkpoint completed in [0-9.]+s: step 7, /run/checkpoint-7", message)
        for message in caplog.messages
    )


def test_a_stop_without_a_save_is_not_called_completed(
    make: Callable[..., Lab], caplog: pytest.LogCaptureFixture
) -> None:
    lab = make()

    def train() -> None:
        raise Preempted("SIGTERM", saved=False)

    lab.run(train)
    assert lab.preemption.released.wait(SOON_S)
    assert "completed" not in caplog.text


def test_a_stopped_driver_restarts_no_group(make: Callable[..., Lab]) -> None:
    lab = make()
    lab.store.client().set(DRIVER_STOP, DriverStop(reason="SIGTERM", deadline=None).to_json())
    lab.stopped()

    def train() -> None:
        raise Preempted("SIGTERM to the driver", step=7, saved=True, checkpoint="/run/checkpoint-7")

    lab.run(train)
    end = time.monotonic() + SOON_S
    while not lab.parked():
        assert time.monotonic() < end
        time.sleep(0.01)
    time.sleep(0.1)
    assert "release" not in lab.preemption.calls


def test_handing_back_twice_counts_once(make: Callable[..., Lab]) -> None:
    lab = make()
    lab.worker.hand_back()
    lab.worker.hand_back()
    assert lab.parked() == 1 and lab.preemption.calls == ["release"]


def test_results_and_errors_of_the_function_pass_through(make: Callable[..., Lab]) -> None:
    lab = make()
    assert lab.worker._guarded(lambda: 7)() == 7

    def fail() -> None:
        raise ZeroDivisionError("of the user")

    with pytest.raises(ZeroDivisionError, match="of the user"):
        lab.worker._guarded(fail)()
    assert lab.parked() == 0 and lab.preemption.calls == []


def test_a_function_that_never_saves_is_handed_back_before_the_deadline(make: Callable[..., Lab]) -> None:
    lab = make()
    lab.worker._drained(time.time() + 2)
    lab.run(threading.Event().wait)
    began = time.monotonic()
    assert lab.preemption.released.wait(SOON_S)
    assert time.monotonic() - began < 5


def test_a_signal_while_ray_shuts_the_worker_down_is_ignored(make: Callable[..., Lab]) -> None:
    lab = make(kill_wait=0)
    lab.worker.close()
    lab.request(15)
    time.sleep(0.3)
    assert lab.worker.stop is None and lab.preemption.calls == []
