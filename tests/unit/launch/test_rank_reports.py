"""What ranks tell their launcher, through a real socket: all of it arrives, and nothing holds training up."""

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
from pathlib import Path
from typing import Any

import pytest

from reprieve.errors import RankFailed
from reprieve.launch.rank_reports import PAUSE, JobStatus, Listener, tell
from reprieve.progress import report
from reprieve.progress.report import Reporter
from reprieve.session.run_reporter import RunReporter
from reprieve.settings import resolve

MANY = 2000
"""More than any socket takes."""

FORKING = """
import os
from reprieve.progress.report import Reporter
reporter = Reporter(0, 1)
reporter.tell("started", resumed=None)
if os.fork() == 0:
    reporter.tell("saved", step=1)
    reporter.step(2)
    os._exit(0)
os.wait()
reporter.tell("finished", step=3)
"""


@pytest.fixture
def reporter(listener: Listener) -> Iterator[Callable[..., Reporter]]:
    """Makes one; by default of rank 0 of 2."""
    made: list[Reporter] = []

    def make(rank: int = 0, path: str | None = None) -> Reporter:
        made.append(Reporter(rank, 2, str(listener.path) if path is None else path))
        return made[-1]

    yield make
    for one in made:
        if one._socket is not None:
            one._socket.close()


def hear(listener: Listener, seen: JobStatus | None = None) -> JobStatus:
    seen = seen or JobStatus()
    for told in listener.read():
        seen.take(told)
    return seen


def test_a_run_from_its_start_to_its_end(listener: Listener, reporter: Callable[..., Reporter]) -> None:
    began, rank = time.monotonic(), reporter()
    assert rank.heard
    rank.send(report.STARTING, checkpoints="/c")
    seen = hear(listener)
    assert (seen.checkpoints, seen.resumed, seen.step, seen.saved_step, seen.pids) == (
        "/c",
        None,
        0,
        None,
        {os.getpid()},
    )
    assert began <= (seen.heard_at() or 0) <= time.monotonic()

    rank.send(report.STARTED, checkpoints="/c", resumed=40, finished=False)
    hear(listener, seen)
    assert (seen.resumed, seen.step, seen.saved_step) == (40, 40, 40)
    assert seen.first_step_at is None

    rank.send(report.RESTORED, fingerprints={"model": "a"}, fingerprint_s=0.5)
    rank.send(report.RESTORED, fingerprints={"data order": "b"}, fingerprint_s=0.25)
    rank.send(report.RESTORED, fingerprints="nonsense", fingerprint_s=None)
    hear(listener, seen)
    assert seen.ranks[0].fingerprints == {"model": "a", "data order": "b"}
    assert seen.ranks[0].fingerprint_s == 0.75

    rank.step(41, done=0.25)
    rank.step(42, done=0.5, eta_s=7.5)
    hear(listener, seen)
    assert (seen.step, seen.done, seen.eta_s) == (42, 0.5, 7.5)
    first, last = seen.first_step_at, seen.heard_at()
    assert first is not None
    assert last is not None
    assert began <= first <= last <= time.monotonic()

    rank.tell(report.SAVED, step=42, path="/c/42", bytes=7, began=began, took=0.1)
    hear(listener, seen)
    assert (seen.saved_step, [one["bytes"] for one in seen.saves]) == (42, [7])
    assert not seen.finished

    rank.tell(report.FINISHED, step=50)
    hear(listener, seen)
    assert (seen.finished, seen.step, seen.done) == (True, 50, 1.0)
    assert seen.ended_at is not None
    assert not seen.torch


def test_a_stop(listener: Listener, reporter: Callable[..., Reporter]) -> None:
    ranks = [reporter(number) for number in range(2)]
    for number, rank in enumerate(ranks):
        rank.send(report.STARTED, checkpoints="/c", resumed=None, finished=False)
        rank.step(8 + number)
    ranks[1].send(report.STOPPING, reason="SIGTERM", step=9)
    seen = hear(listener)
    assert (seen.stopping, seen.step, seen.saved_step, seen.stopped) == ("SIGTERM", 9, None, [])
    for rank in ranks:
        rank.send(report.STOPPED, step=10, saved=True, times={"agreed": 1.5}, fingerprints={"model": "a"})
    hear(listener, seen)
    assert (seen.step, seen.saved_step) == (10, 10)
    assert [one["times"] for one in seen.stopped] == [{"agreed": 1.5}] * 2
    assert not seen.finished


def test_a_save_of_all_ranks_is_one_save(listener: Listener, reporter: Callable[..., Reporter]) -> None:
    ranks = [reporter(number) for number in range(2)]
    for rank in ranks:
        rank.send(report.STARTED, checkpoints="/c", resumed=None)
    for rank in ranks:
        rank.send(report.SAVED, step=5, began=1.0)
    assert [one["rank"] for one in hear(listener).saves] == [0]


def test_a_refusal(listener: Listener, reporter: Callable[..., Reporter]) -> None:
    reporter(1).send(report.REFUSED, error="StateMismatch: größe")
    assert hear(listener).refused == "StateMismatch: größe"


def test_who_only_heard_of_a_refusal_tells_it_as_the_one_that_refused(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(report.LAUNCHER, str(listener.path))
    reporter = RunReporter(0, 3, resolve({}), bar=False)
    reporter.refused(RankFailed(2, "StateMismatch: another model", during="prepare", for_a_person=True))
    reporter._reporter.close()
    faulthandler.unregister(signal.SIGQUIT)
    assert hear(listener).refused == "StateMismatch: another model"


def test_a_long_refusal_is_heard(listener: Listener, reporter: Callable[..., Reporter]) -> None:
    """A state with thousands of keys that do not fit."""
    reporter().send(report.REFUSED, error="StateMismatch: " + "layer.weight, " * 10_000)
    assert str(hear(listener).refused).startswith("StateMismatch: layer.weight")


def test_an_import_of_torch_is_not_a_rank(listener: Listener, reporter: Callable[..., Reporter]) -> None:
    reporter(-1).send(report.TORCH)
    seen = hear(listener)
    assert seen.torch
    assert (seen.ranks, seen.heard_at(), seen.finished) == ({}, None, False)


def test_a_step_that_is_told_again_is_life(listener: Listener, reporter: Callable[..., Reporter]) -> None:
    rank = reporter()
    rank.step(5)
    seen = hear(listener)
    before = seen.heard_at()
    rank.step(5)
    assert (hear(listener, seen).heard_at() or 0) > (before or 0), "an evaluation, which may take long"


def test_a_rank_that_started_again_is_not_finished_any_more(
    listener: Listener, reporter: Callable[..., Reporter]
) -> None:
    rank = reporter()
    rank.send(report.FINISHED, step=5)
    rank.send(report.STARTED, resumed=3)
    seen = hear(listener)
    assert (seen.finished, seen.step) == (False, 3)


def test_somebody_else_asks_for_a_pause(listener: Listener) -> None:
    assert tell(str(listener.path), PAUSE, why="x")
    assert [(one["event"], one["why"]) for one in listener.read()] == [(PAUSE, "x")]
    assert not tell(str(listener.path.with_name("nobody")), PAUSE)


# Nothing disturbs training


def test_without_a_launcher_nothing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(report.LAUNCHER, raising=False)
    rank = Reporter(0, 1)
    assert not rank.heard
    rank.send(report.STARTED)
    rank.step(1)


def test_a_launcher_that_is_gone_is_not_waited_for(listener: Listener, reporter: Callable[..., Reporter]) -> None:
    rank = reporter()
    listener.close()
    began = time.monotonic()
    rank.send(report.STARTED)
    rank.step(1)
    assert time.monotonic() - began < 0.5
    assert not listener.path.exists()


def test_a_launcher_that_does_not_read_holds_up_no_step(listener: Listener, reporter: Callable[..., Reporter]) -> None:
    rank = reporter()
    began = time.monotonic()
    for step in range(MANY):
        rank.step(step)
    assert time.monotonic() - began < 0.5
    assert 0 < len(listener.read()) < MANY, "the rest is lost"

    for step in range(MANY):
        rank.step(step)
    began = time.monotonic()
    rank.send(report.SAVED, step=7)
    assert 0.5 < time.monotonic() - began < 5
    began = time.monotonic()
    rank.step(MANY)
    assert time.monotonic() - began < 0.4, "the patience of the last report is not this one's"

    listener.read()
    rank.send(report.SAVED, step=8)
    assert [one["step"] for one in listener.read()] == [8]


def test_a_forked_child_tells_nothing(listener: Listener) -> None:
    env = {**os.environ, report.LAUNCHER: str(listener.path)}
    subprocess.run([sys.executable, "-c", FORKING], env=env, check=True, timeout=60)
    assert [one["event"] for one in listener.read()] == [report.STARTED, report.FINISHED]


# Nothing disturbs the launcher

STEP: dict[str, Any] = {"event": report.STEP, "pid": 1, "at": 1.0, "rank": 0, "world_size": 1, "step": 1}
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
}


@pytest.mark.parametrize("data", GARBAGE.values(), ids=GARBAGE.keys())
def test_garbage_is_passed_over(data: bytes, listener: Listener, reporter: Callable[..., Reporter]) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.sendto(data, str(listener.path))
    reporter().step(5)
    seen = hear(listener)
    assert (seen.step, set(seen.ranks)) == (5, {0})


def test_an_event_of_a_newer_version_is_passed_over(listener: Listener, reporter: Callable[..., Reporter]) -> None:
    rank = reporter()
    rank.send("of tomorrow", colour="blue")
    rank.step(5)
    assert hear(listener).step == 5


def test_only_this_user_can_tell(listener: Listener) -> None:
    folder: Path = listener.path.parent
    assert folder.stat().st_mode & 0o777 == 0o700
    listener.close()
    assert not folder.exists()
