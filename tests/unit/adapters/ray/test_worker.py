"""A worker from the stop request to the moment when it is handed back. Without a cluster."""

from __future__ import annotations

import gc
import os
import re
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from reprieve.adapters.ray import internals, reports, worker
from reprieve.adapters.ray.config import JITCheckpointConfig, resolve_config
from reprieve.adapters.ray.internals import WorkerContext
from reprieve.adapters.ray.messages import DRIVER_STOP, PARKED, SAVED, DriverStop
from reprieve.adapters.ray.worker import RayWorker
from reprieve.errors import ConfigError
from reprieve.preemption.notices import Notice
from reprieve.preemption.process_exit import Preempted, ProcessExit
from reprieve.preemption.process_host import StopRequest
from reprieve.settings import resolve
from reprieve.storage.uri import run_folder
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
        context = WorkerContext(rank=0, world_size=1, local_rank=0, run_name="run", run_id="1", folder=None)
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
        monkeypatch.setattr(reports, "process_exit", process_exit)

    def request(self, number: int | None = None, *, deadline_s: float | None = None) -> None:
        deadline = None if deadline_s is None else time.monotonic() + deadline_s
        self.worker._stop_listener.request("SIGTERM", number=number, deadline=deadline)

    def until(self, is_true: Callable[[], object], what: str) -> None:
        end = time.monotonic() + SOON_S
        while not is_true():
            assert time.monotonic() < end, f"not: {what}"
            time.sleep(0.01)

    def held(self) -> None:
        """Wait until the request is there."""
        self.until(lambda: self.preemption.calls, "the controller is held")

    def stopped(self) -> StopRequest:
        self.until(lambda: self.worker.stop is not None, "the stop is passed on")
        assert self.worker.stop is not None
        return self.worker.stop

    def parked(self) -> int:
        return int(self.store.get(PARKED) or 0)

    def run(self, function: Callable[[], Any]) -> threading.Thread:
        """Run the training function as Ray does it, in a thread."""
        thread = threading.Thread(target=self.worker._guarded(function), daemon=True)
        thread.start()
        return thread


def notice(after_s: float) -> Notice:
    """A cloud will reclaim the machine."""
    deadline = datetime.now(timezone.utc) + timedelta(seconds=after_s)
    return Notice(source="AWS", reason="the machine is reclaimed", deadline=deadline)


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


@pytest.mark.parametrize(
    "follow",
    [
        pytest.param(lambda lab: lab.worker._drained(None), id="a drain"),
        pytest.param(lambda lab: lab.worker._drained(time.time() + 600), id="a drain with a deadline"),
        pytest.param(lambda lab: lab.worker._stop_listener._noticed(notice(600)), id="a notice"),
        pytest.param(lambda lab: lab.worker.request_stop("a stop request to another rank"), id="another rank's stop"),
    ],
)
def test_what_follows_a_signal_ends_kill_wait(make: Callable[..., Lab], follow: Callable[[Lab], None]) -> None:
    lab = make(kill_wait=3600)
    lab.request(15)
    lab.held()
    follow(lab)
    lab.stopped()


def test_a_later_deadline_reaches_the_function_its_sessions_and_the_hand_back(make: Callable[..., Lab]) -> None:
    lab = make(kill_wait=0)
    received: list[StopRequest] = []
    lab.worker.subscribe(received.append)
    lab.request(15)
    assert lab.stopped().deadline is None
    lab.run(threading.Event().wait)
    lab.worker._drained(time.time() + 1.5)
    lab.until(lambda: len(received) == 2, "the session has the deadline")
    remaining_s = received[-1].remaining_s()
    assert received[-1].certain and remaining_s is not None and remaining_s <= 1.5
    assert lab.worker.stop == received[-1]
    assert lab.preemption.released.wait(SOON_S), "the process is not handed back before the deadline"


def test_a_later_deadline_that_is_not_closer_changes_nothing(make: Callable[..., Lab]) -> None:
    lab = make(kill_wait=0, grace=60)
    received: list[StopRequest] = []
    lab.worker.subscribe(received.append)
    lab.request(15)
    stop = lab.stopped()
    lab.worker._drained(time.time() + 600)
    lab.worker._drained(None)
    time.sleep(0.2)
    assert received == [stop]


@pytest.mark.parametrize("signals", [("SIGUSR1",), ("SIGTERM", "SIGUSR2")])
def test_other_signals_stop_a_worker_too(
    make: Callable[..., Lab], caplog: pytest.LogCaptureFixture, signals: tuple[str, ...]
) -> None:
    lab = make(kill_wait=0, signals=signals)
    os.kill(os.getpid(), getattr(signal, signals[-1]))
    lab.stopped()
    assert f"{signals[-1]} received, initiating JIT checkpoint in 0.0s" in caplog.messages


def test_a_notice_of_a_cloud_stops_a_worker_without_kill_wait(make: Callable[..., Lab]) -> None:
    lab = make(kill_wait=3600)
    lab.worker._stop_listener._noticed(notice(120))
    stop = lab.stopped()
    remaining_s = stop.remaining_s()
    assert stop.reason == "AWS: the machine is reclaimed"
    assert stop.certain and remaining_s is not None and 100 < remaining_s <= 120


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


# What a Trainer in the function finds


@pytest.mark.parametrize(
    ("folder", "given", "checkpoints"),
    [
        (Path("/shared/run"), {}, "/shared/run/reprieve"),
        (Path("/shared/run"), {"CHECKPOINT_URI": "/nfs/mine"}, "/nfs/mine"),
        (None, {"CHECKPOINT_URI": "/nfs/mine"}, "/nfs/mine"),
        (None, {}, "s3://bucket/run/reprieve"),
    ],
)
def test_a_trainer_saves_where_all_nodes_see_it(
    monkeypatch: pytest.MonkeyPatch, folder: Path | None, given: dict[str, str], checkpoints: str
) -> None:
    monkeypatch.setattr(os, "environ", {})
    context = WorkerContext(
        rank=0, world_size=1, local_rank=0, run_name="run", run_id="1", folder=folder, uri="s3://bucket/run"
    )
    worker.set_environment(resolve_config(JITCheckpointConfig(enabled=True), given), context)
    found = resolve({}, os.environ).checkpoints
    assert found == checkpoints
    if "://" in checkpoints:
        with pytest.raises(ConfigError, match="'s3://bucket/run/reprieve': this version writes to local and mounted"):
            run_folder(found, None)


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


def test_what_is_saved_is_known_before_the_function_has_unwound(
    make: Callable[..., Lab], caplog: pytest.LogCaptureFixture
) -> None:
    """A session has saved, and a `finally` hangs: the process is handed back, and the controller knows the step."""
    lab = make()

    def train() -> None:
        stopped = Preempted("SIGTERM", step=7, saved=True, checkpoint="/c-7", requested_at=time.monotonic() - 60)
        lab.worker.stopped(stopped)
        lab.worker.hand_back()
        try:
            raise stopped
        finally:
            threading.Event().wait()

    lab.run(train)
    assert lab.preemption.released.wait(SOON_S)
    assert lab.store.get(SAVED) == b"7"
    [completed] = [message for message in caplog.messages if "completed" in message]
    assert re.fullmatch(r"JIT checkpoint completed in 6\d\.\ds: step 7, /c-7", completed), completed


@pytest.mark.parametrize("end", ["returns", "fails"])
def test_a_function_that_catches_the_stop_is_stopped_all_the_same(
    make: Callable[..., Lab], caplog: pytest.LogCaptureFixture, end: str
) -> None:
    """Ray would take the run for finished, or count a failure."""
    lab = make()

    def train() -> int:
        try:
            stopped = Preempted("SIGTERM", step=7, saved=True, checkpoint="/run/checkpoint-7")
            lab.worker.stopped(stopped)
            raise stopped
        except SystemExit:
            if end == "fails":
                raise ZeroDivisionError("of the user") from None
            return 7

    thread = lab.run(train)
    assert lab.preemption.released.wait(SOON_S)
    assert thread.is_alive() and lab.parked() == 1
    assert ("an error after the stop is ignored: ZeroDivisionError: of the user" in caplog.text) == (end == "fails")


def test_a_report_that_ends_the_function_hands_the_process_back_in_time(
    make: Callable[..., Lab], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its `finally` hangs. Another rank's release would not be seen: Ray reads that of the first rank."""
    monkeypatch.setattr(reports, "UNWIND_LIMIT_S", 0.2)
    monkeypatch.setattr(internals.Commit, "wait", lambda commit, timeout_s: "/run/checkpoint_1")
    lab = make()
    report = lab.worker.reports.wrap(lambda metrics, checkpoint: None)
    lab.worker._drained(None)
    lab.stopped()

    def train() -> None:
        try:
            while lab.worker.reports.should_checkpoint() or not report({"step": 3}, "checkpoint"):
                report({"step": 3}, "checkpoint")
        finally:
            threading.Event().wait()

    lab.run(train)
    assert lab.preemption.released.wait(SOON_S)
    assert lab.store.get(SAVED) == b"3"


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
