"""Reports of ranks to their launcher through a real socket: they arrive, and sending never delays training."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from reprieve.errors import RankFailed
from reprieve.launch.rank_status import JobStatus
from reprieve.launcher_protocol import (
    LAUNCHER_SOCKET,
    VERSION,
    Finished,
    Listener,
    Message,
    Pause,
    Refused,
    Report,
    Reporter,
    Restored,
    Saved,
    Started,
    Starting,
    Step,
    Stopped,
    Stopping,
    TorchImported,
    send_once,
)
from reprieve.session.run_reporter import RunReporter
from reprieve.settings import resolve

MANY = 2000
"""More datagrams than any socket buffers."""

FORKING = """
import os
from reprieve.launcher_protocol import Finished, Reporter, Saved, Started, Step
reporter = Reporter(0, 1)
reporter.send(Started())
if os.fork() == 0:
    reporter.send(Saved(step=1, began=1.0))
    reporter.send(Step(step=2), wait=False)
    os._exit(0)
os.wait()
reporter.send(Finished(step=3))
"""


@pytest.fixture
def reporter(listener: Listener) -> Iterator[Callable[..., Reporter]]:
    """Create reporters; by default of rank 0 of 2."""
    made: list[Reporter] = []

    def make(rank: int = 0, path: str | None = None) -> Reporter:
        made.append(Reporter(rank, 2, str(listener.path) if path is None else path))
        return made[-1]

    yield make
    for reporter in made:
        reporter.close()


def send_step(reporter: Reporter, step: int, **more: Any) -> None:
    reporter.send(Step(step=step, **more), wait=False)


def receive(listener: Listener, status: JobStatus | None = None) -> JobStatus:
    status = status or JobStatus()
    for report in listener.read():
        status.update(report)
    return status


def test_a_run_from_its_start_to_its_end(listener: Listener, reporter: Callable[..., Reporter]) -> None:
    began, rank = time.monotonic(), reporter()
    assert rank.has_launcher
    rank.send(Starting(checkpoints="/c"))
    status = receive(listener)
    assert (status.checkpoints, status.resumed, status.step, status.saved_step, status.pids) == (
        "/c",
        None,
        0,
        None,
        {os.getpid()},
    )
    assert began <= (status.last_report_at or 0) <= time.monotonic()

    rank.send(Started(checkpoints="/c", resumed=40, finished=False))
    receive(listener, status)
    assert (status.resumed, status.step, status.saved_step) == (40, 40, 40)
    assert status.first_step_at is None

    rank.send(Restored(fingerprints={"model": "a"}, fingerprint_s=0.5))
    rank.send(Restored(fingerprints={"data order": "b"}, fingerprint_s=0.25))
    rank.send(Restored(fingerprints="nonsense", fingerprint_s=None))  # type: ignore[arg-type]
    receive(listener, status)
    assert status.ranks[0].fingerprints == {"model": "a", "data order": "b"}
    assert status.ranks[0].fingerprint_s == 0.75

    send_step(rank, 41, done=0.25)
    send_step(rank, 42, done=0.5, eta_s=7.5)
    receive(listener, status)
    assert (status.step, status.done, status.eta_s) == (42, 0.5, 7.5)
    first, last = status.first_step_at, status.last_report_at
    assert first is not None
    assert last is not None
    assert began <= first <= last <= time.monotonic()

    rank.send(Saved(step=42, path="/c/42", bytes=7, began=began, took=0.1))
    receive(listener, status)
    assert (status.saved_step, [save.bytes for save in status.saves]) == (42, [7])
    assert not status.finished

    rank.send(Finished(step=50))
    receive(listener, status)
    assert (status.finished, status.step, status.done) == (True, 50, 1.0)
    assert status.last_step_at is not None
    assert not status.torch


def test_a_stop(listener: Listener, reporter: Callable[..., Reporter]) -> None:
    ranks = [reporter(number) for number in range(2)]
    for number, rank in enumerate(ranks):
        rank.send(Started(checkpoints="/c", resumed=None, finished=False))
        send_step(rank, 8 + number)
    ranks[1].send(Stopping(reason="SIGTERM", step=9))
    status = receive(listener)
    assert (status.stopping, status.step, status.saved_step, status.stopped) == ("SIGTERM", 9, None, [])
    for rank in ranks:
        rank.send(Stopped(step=10, saved=True, times={"agreed": 1.5}, fingerprints={"model": "a"}))
    receive(listener, status)
    assert (status.step, status.saved_step) == (10, 10)
    assert [stopped.times for stopped in status.stopped] == [{"agreed": 1.5}] * 2
    assert not status.finished


def test_a_save_of_all_ranks_is_one_save(listener: Listener, reporter: Callable[..., Reporter]) -> None:
    ranks = [reporter(number) for number in range(2)]
    for rank in ranks:
        rank.send(Started(checkpoints="/c", resumed=None))
    for number, rank in enumerate(ranks):
        rank.send(Saved(step=5, path=f"/c/{number}", began=1.0))
    assert [save.path for save in receive(listener).saves] == ["/c/0"]


def test_a_refusal(listener: Listener, reporter: Callable[..., Reporter]) -> None:
    reporter(1).send(Refused(error="StateMismatch: größe"))
    assert receive(listener).refused == "StateMismatch: größe"


def test_who_only_heard_of_a_refusal_tells_it_as_the_one_that_refused(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(LAUNCHER_SOCKET, str(listener.path))
    reporter = RunReporter(0, 3, resolve({}), bar=False)
    reporter.refused(RankFailed(2, "StateMismatch: another model", during="prepare", permanent=True))
    reporter._reporter.close()
    faulthandler.unregister(signal.SIGQUIT)
    assert receive(listener).refused == "StateMismatch: another model"


def test_a_long_refusal_is_heard(listener: Listener, reporter: Callable[..., Reporter]) -> None:
    """A state with thousands of keys that do not fit."""
    reporter().send(Refused(error="StateMismatch: " + "layer.weight, " * 10_000))
    assert str(receive(listener).refused).startswith("StateMismatch: layer.weight")


def test_an_import_of_torch_is_not_a_rank(listener: Listener, reporter: Callable[..., Reporter]) -> None:
    reporter(-1).send(TorchImported())
    status = receive(listener)
    assert status.torch
    assert (status.ranks, status.last_report_at, status.finished) == ({}, None, False)


def test_a_step_that_is_told_again_is_life(listener: Listener, reporter: Callable[..., Reporter]) -> None:
    rank = reporter()
    send_step(rank, 5)
    status = receive(listener)
    before = status.last_report_at
    send_step(rank, 5)
    assert (receive(listener, status).last_report_at or 0) > (before or 0), "an evaluation, which may take long"


def test_a_rank_that_started_again_is_not_finished_any_more(
    listener: Listener, reporter: Callable[..., Reporter]
) -> None:
    rank = reporter()
    rank.send(Finished(step=5))
    rank.send(Started(resumed=3))
    status = receive(listener)
    assert (status.finished, status.step) == (False, 3)


def test_somebody_else_asks_for_a_pause(listener: Listener) -> None:
    assert send_once(Pause(), str(listener.path))
    assert [report.message for report in listener.read()] == [Pause()]
    assert not send_once(Pause(), str(listener.path.with_name("nobody")))


# Nothing disturbs training


def test_without_a_launcher_nothing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(LAUNCHER_SOCKET, raising=False)
    rank = Reporter(0, 1)
    assert not rank.has_launcher
    rank.send(Started())
    send_step(rank, 1)


def test_a_launcher_that_is_gone_is_not_waited_for(listener: Listener, reporter: Callable[..., Reporter]) -> None:
    rank = reporter()
    listener.close()
    began = time.monotonic()
    rank.send(Started())
    send_step(rank, 1)
    assert time.monotonic() - began < 0.5
    assert not listener.path.exists()


def test_a_launcher_that_does_not_read_holds_up_no_step(listener: Listener, reporter: Callable[..., Reporter]) -> None:
    rank = reporter()
    began = time.monotonic()
    for step in range(MANY):
        send_step(rank, step)
    assert time.monotonic() - began < 0.5
    assert 0 < len(listener.read()) < MANY, "the rest is lost"

    for step in range(MANY):
        send_step(rank, step)
    began = time.monotonic()
    rank.send(Saved(step=7, began=1.0))
    assert 0.5 < time.monotonic() - began < 5
    began = time.monotonic()
    send_step(rank, MANY)
    assert time.monotonic() - began < 0.4, "the patience of the last report is not this one's"

    listener.read()
    rank.send(Saved(step=8, began=1.0))
    assert [report.message for report in listener.read()] == [Saved(step=8, began=1.0)]


def test_a_forked_child_tells_nothing(listener: Listener) -> None:
    env = {**os.environ, LAUNCHER_SOCKET: str(listener.path)}
    subprocess.run([sys.executable, "-c", FORKING], env=env, check=True, timeout=60)
    assert [report.message for report in listener.read()] == [Started(), Finished(step=3)]


# Nothing disturbs the launcher

STEP: dict[str, Any] = {"event": "step", "pid": 1, "at": 1.0, "rank": 0, "world_size": 1, "step": 1}
GARBAGE = {
    "empty": b"",
    "no text": b"\xff\xfe\x00",
    "no JSON": b"hello",
    "cut": json.dumps(STEP).encode()[:-5],
    "no object": b"[1, 2]",
    "nested": b"[" * 50_000,
    "no event": b'{"rank": 0, "pid": 1, "at": 1.0}',
    "an event that is no text": b'{"event": 7, "rank": 0, "pid": 1, "at": 1.0}',
    "no rank": b'{"event": "started"}',
    "a rank that is no number": b'{"event": "started", "rank": "x"}',
    "no process": json.dumps({**STEP, "pid": None}).encode(),
    "no time": json.dumps({**STEP, "at": "noon"}).encode(),
    "no step": json.dumps({**STEP, "step": None}).encode(),
    "only a rank": b'{"event": "saved", "rank": 0}',
    "no fraction": json.dumps({**STEP, "done": "half"}).encode(),
    "a version that is no number": json.dumps({**STEP, "version": "one"}).encode(),
    "a newer version": json.dumps({**STEP, "version": VERSION + 1}).encode(),
    "an unknown kind": json.dumps({**STEP, "event": "of tomorrow"}).encode(),
}


@pytest.mark.parametrize("data", GARBAGE.values(), ids=GARBAGE.keys())
def test_garbage_is_passed_over(data: bytes, listener: Listener, reporter: Callable[..., Reporter]) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.sendto(data, str(listener.path))
    send_step(reporter(), 5)
    status = receive(listener)
    assert (status.step, set(status.ranks)) == (5, {0})


def test_a_field_of_a_newer_version_is_ignored(listener: Listener) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.sendto(json.dumps({**STEP, "colour": "blue", "version": VERSION}).encode(), str(listener.path))
    assert [report.message for report in listener.read()] == [Step(step=1)]


@pytest.mark.parametrize("kind", Message.__subclasses__(), ids=lambda kind: kind.event)
def test_every_message_survives_the_wire(kind: type[Message]) -> None:
    required = {"checkpoints": "/c", "fingerprints": {"model": "a"}, "fingerprint_s": 0.5, "step": 3, "began": 1.5}
    required |= {"reason": "SIGTERM", "saved": True, "error": "größe", "pids": [1, 2], "undecided": True}
    names = {entry.name for entry in fields(kind)}
    message = kind(**{name: value for name, value in required.items() if name in names})
    report = Report(message=message, pid=7, at=1.25, rank=3, world_size=4)
    assert Report.from_json(report.to_json()) == report


def test_only_this_user_can_tell(listener: Listener) -> None:
    folder: Path = listener.path.parent
    assert folder.stat().st_mode & 0o777 == 0o700
    listener.close()
    assert not folder.exists()
