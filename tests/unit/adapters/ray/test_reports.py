"""Functions that save by themselves stop together, whichever worker reports the checkpoint. Workers are threads."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest

from reprieve.adapters.ray import internals, reports, worker
from reprieve.adapters.ray.reports import ReportedCheckpoints
from reprieve.errors import RankFailed
from reprieve.preemption.process_exit import Preempted
from reprieve.preemption.process_host import StopRequest
from reprieve.ranks.group import Ranks
from tests.support.memory_store import MemoryStore

LIMIT_S = 30.0
STEPS = 60


class FakeWorker:
    """What `ReportedCheckpoints` needs of a `RayWorker`."""

    def __init__(self) -> None:
        self.has_session = False
        self.stop: StopRequest | None = None
        self.save_began: float | None = None
        self.requested_by_peer: list[str] = []
        self.has_stopped: list[Preempted] = []

    def request_stop(self, reason: str) -> None:
        self.requested_by_peer.append(reason)

    def stopped(self, stopped: Preempted) -> None:
        self.has_stopped.append(stopped)


class Rank:
    """One worker whose function trains, and what it did."""

    def __init__(self, rank: int, ranks: Ranks, barrier: threading.Barrier) -> None:
        self.rank = rank
        self.worker = FakeWorker()
        self.reports = ReportedCheckpoints(ranks, self.worker)  # type: ignore[arg-type]
        self.report = self.reports.wrap(self._report)
        self.reported: list[tuple[int, Any]] = []
        self.true_at: list[int] = []
        self.stopped: Preempted | None = None
        self.steps = 0
        self._barrier = barrier

    def _report(self, metrics: dict[str, Any], checkpoint: Any = None) -> None:
        """Ray's: all workers meet in it."""
        self._barrier.wait()
        self.reported.append((metrics["step"], checkpoint))

    def request_stop(self) -> None:
        """Request a stop, and wait until this rank takes no step any more that is not agreed on."""
        self.reports.request_stop()
        agreement = self.reports._agreement
        end = time.monotonic() + LIMIT_S
        while not agreement._alone and agreement._position.generation == 0:
            assert time.monotonic() < end
            time.sleep(0.001)

    def train(self, loop: Callable[[Rank, int], None]) -> None:
        try:
            for step in range(1, STEPS + 1):
                self._barrier.wait()  # an all-reduce
                self.steps = step
                loop(self, step)
        except Preempted as stopped:
            self.stopped = stopped
        finally:
            self.reports.finish()


class Job:
    """Two workers."""

    def __init__(self, world_size: int = 2) -> None:
        store = MemoryStore()
        barrier = threading.Barrier(world_size, timeout=LIMIT_S)
        self.ranks = [
            Rank(rank, Ranks(rank, world_size, store.client() if world_size > 1 else None), barrier)
            for rank in range(world_size)
        ]

    def run(self, *loops: Callable[[Rank, int], None]) -> None:
        threads = [
            threading.Thread(target=rank.train, args=(loops[rank.rank % len(loops)],), daemon=True)
            for rank in self.ranks
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT_S)
        assert not any(thread.is_alive() for thread in threads), "a worker hangs"

    def close(self) -> None:
        for rank in self.ranks:
            rank.reports._agreement.close()


@pytest.fixture
def job() -> Iterator[Job]:
    job = Job()
    yield job
    job.close()


def commit(monkeypatch: pytest.MonkeyPatch, committed: Callable[[], str | None]) -> None:
    """Let Ray answer whether it has committed the last report: with the path of its checkpoint, or None."""
    monkeypatch.setattr(internals.Commit, "wait", lambda commit, timeout_s: committed() or time.sleep(0.01))


class FakeExit:
    """Where a process is to be handed back."""

    def __init__(self) -> None:
        self.scheduled_s: list[float] = []

    def schedule(self, seconds: float) -> None:
        self.scheduled_s.append(seconds)


@pytest.fixture(autouse=True)
def process_exit(monkeypatch: pytest.MonkeyPatch) -> FakeExit:
    process_exit = FakeExit()
    monkeypatch.setattr(reports, "process_exit", process_exit)
    return process_exit


@pytest.fixture(autouse=True)
def _committed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    commit(monkeypatch, lambda: "/run/checkpoint_1")


def document_loop(
    *, stop_at: int = 5, on: int = 0, has_checkpoint: Callable[[Rank], bool] = lambda rank: True
) -> Callable[[Rank, int], None]:
    """The loop of the document: it saves where `should_checkpoint` is true."""

    def loop(rank: Rank, step: int) -> None:
        if step == stop_at and rank.rank == on:
            rank.request_stop()
        if rank.reports.should_checkpoint():
            rank.true_at.append(step)
            rank.report({"step": step}, "checkpoint" if has_checkpoint(rank) else None)

    return loop


@pytest.mark.parametrize("on", [0, 1])
def test_it_is_true_in_the_same_call_of_all_workers(job: Job, on: int) -> None:
    job.run(document_loop(on=on))
    first, second = job.ranks
    assert first.true_at == second.true_at and len(first.true_at) == 1
    assert 5 <= first.true_at[0] < STEPS
    for rank in job.ranks:
        assert rank.stopped is not None and rank.stopped.saved
        assert rank.steps == first.true_at[0], "it trained on after the stop"
        assert rank.stopped.checkpoint == "/run/checkpoint_1"


def test_the_other_worker_hears_of_the_stop(job: Job) -> None:
    job.run(document_loop(on=1))
    assert job.ranks[0].worker.requested_by_peer == ["a stop request to another rank"]


def test_without_a_stop_nothing_changes(job: Job) -> None:
    job.run(document_loop(stop_at=0))
    assert [rank.steps for rank in job.ranks] == [STEPS, STEPS]
    assert [rank.true_at for rank in job.ranks] == [[], []]


@pytest.mark.parametrize("saving", [0, 1])
def test_a_checkpoint_on_one_worker_ends_all(job: Job, saving: int) -> None:
    """Rank 0 logs where it is, and how long it took since the request, whichever worker knows that."""
    job.ranks[1].worker.save_began = time.monotonic() - 60
    job.run(document_loop(has_checkpoint=lambda rank: rank.rank == saving))
    assert [len(rank.true_at) for rank in job.ranks] == [1, 1]
    for rank in job.ranks:
        assert rank.stopped is not None and rank.stopped.saved
        assert rank.stopped.checkpoint == "/run/checkpoint_1"
        assert rank.stopped.requested_at is not None and 60 <= time.monotonic() - rank.stopped.requested_at < 90


def test_a_worker_is_told_of_the_stop_and_handed_back_although_its_function_hangs(
    job: Job, process_exit: FakeExit
) -> None:
    job.run(document_loop())
    assert [rank.worker.has_stopped for rank in job.ranks] == [[rank.stopped] for rank in job.ranks]
    assert process_exit.scheduled_s == [reports.UNWIND_LIMIT_S] * 2


def test_a_report_without_a_checkpoint_continues_with_one_warning(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    job.run(document_loop(has_checkpoint=lambda rank: rank.steps >= 20))
    assert [rank.steps for rank in job.ranks] == [20, 20]
    assert all(rank.stopped is not None and rank.stopped.saved for rank in job.ranks)
    warnings = [record for record in caplog.records if "no worker reported a checkpoint" in record.message]
    assert len(warnings) == 2, "one for each worker"


def test_a_function_that_never_asks_stops_at_its_next_report_with_a_checkpoint(
    job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    def loop(rank: Rank, step: int) -> None:
        if step == 5 and rank.rank == 0:
            rank.request_stop()
        rank.report({"step": step}, "checkpoint" if step % 10 == 0 else None)

    job.run(loop)
    assert job.ranks[0].steps == job.ranks[1].steps
    assert job.ranks[0].steps % 10 == 0
    assert all(rank.stopped is not None and rank.stopped.saved for rank in job.ranks)
    assert sum("does not save when" in record.message for record in caplog.records) in (0, 2)


def test_a_periodic_report_in_progress_does_not_end_one_worker_alone(job: Job) -> None:
    """The stop becomes known while the workers are in different calls."""

    def loop(rank: Rank, step: int) -> None:
        if step == 7 and rank.rank == 1:
            rank.request_stop()
            time.sleep(0.05)
        due = rank.reports.should_checkpoint()
        if due or step % 7 == 0:
            rank.report({"step": step}, "checkpoint")

    job.run(loop)
    assert job.ranks[0].steps == job.ranks[1].steps
    assert job.ranks[0].reported == job.ranks[1].reported


def test_a_long_save_on_one_worker_is_waited_for(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reports, "_ARRIVAL_LIMIT", timedelta(seconds=1))

    def has_checkpoint(rank: Rank) -> bool:
        if rank.rank == 0:
            time.sleep(2.5)
        return rank.rank == 0

    job.run(document_loop(has_checkpoint=has_checkpoint))
    assert all(rank.stopped is not None and rank.stopped.saved for rank in job.ranks)


def test_asked_on_some_workers_only_is_an_error_that_names_the_fix(
    job: Job, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(reports, "_ARRIVAL_LIMIT", timedelta(seconds=0.5))

    def silent(rank: Rank, step: int) -> None:
        rank.report({"step": step})

    def asking(rank: Rank, step: int) -> None:
        if step == 5:
            rank.request_stop()
        rank.reports.should_checkpoint()
        rank.report({"step": step})

    began = time.monotonic()
    job.run(asking, silent)
    assert time.monotonic() - began < LIMIT_S / 2, "the workers wait again and again"
    assert [rank.steps for rank in job.ranks] == [STEPS, STEPS]
    assert [rank.stopped for rank in job.ranks] == [None, None]
    errors = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert errors and all(
        "Call should_checkpoint() on every worker, equally often" in record.message for record in errors
    )


def test_a_worker_that_ends_without_a_report_holds_nobody(job: Job) -> None:
    failures: list[str] = []

    def ending(rank: Rank, step: int) -> None:
        if rank.reports.should_checkpoint():
            raise Preempted("a break out of the loop")

    def reporting(rank: Rank, step: int) -> None:
        if step == 5:
            rank.request_stop()
        if rank.reports.should_checkpoint():
            try:
                rank.report({"step": step}, "checkpoint")
            except RankFailed as error:
                failures.append(str(error))
                raise Preempted("failed") from error

    job.run(reporting, ending)
    (failure,) = failures
    assert "rank 1: RanksError: its training function ended without a report" in failure


def test_a_report_that_fails_is_not_said_to_be_missing(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    for rank in job.ranks:
        rank.report = rank.reports.wrap(_fail)

    def loop(rank: Rank, step: int) -> None:
        if step == 5 and rank.rank == 0:
            rank.request_stop()
        if rank.reports.should_checkpoint():
            with pytest.raises(ZeroDivisionError):
                rank.report({"step": step}, "checkpoint")
            raise Preempted("the function ends by that error")

    job.run(loop)
    assert all(rank.stopped is not None for rank in job.ranks)
    assert "ended without a report" not in caplog.text


def _fail(metrics: dict[str, Any], checkpoint: Any = None) -> None:
    raise ZeroDivisionError("of the upload")


def test_a_stop_that_the_function_caught_is_raised_again() -> None:
    job = Job(world_size=1)
    (rank,) = job.ranks

    def loop(rank: Rank, step: int) -> None:
        if step == 3:
            rank.request_stop()
        if rank.reports.should_checkpoint():
            with pytest.raises(Preempted) as first:
                rank.report({"step": step}, "checkpoint")
            with pytest.raises(Preempted) as second:
                rank.report({"step": step}, "checkpoint")
            assert second.value is first.value
            rank.reports.should_checkpoint()

    job.run(loop)
    assert rank.stopped is not None and rank.stopped.saved
    assert rank.steps == 3 and len(rank.reported) == 1
    job.close()


def test_a_checkpoint_that_is_not_committed_is_not_called_saved(
    job: Job, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    commit(monkeypatch, lambda: None)
    now = time.monotonic()
    for rank in job.ranks:
        rank.worker.stop = StopRequest("SIGTERM", now, now + 1, certain=True)
    job.run(document_loop())
    for rank in job.ranks:
        assert rank.stopped is not None and not rank.stopped.saved
        assert rank.stopped.reason == "SIGTERM" and rank.stopped.checkpoint is None
    assert "has not committed the checkpoint before the deadline" in caplog.text


@pytest.mark.parametrize(("metrics", "step"), [({"epoch": 1.25}, 1), ({"step": "text"}, 3), ({"step": None}, 3)])
def test_any_metrics_may_be_reported(metrics: dict[str, Any], step: int) -> None:
    """The step that is saved is the one that they name, or the number of reports."""
    job = Job(world_size=1)
    (rank,) = job.ranks
    report = rank.reports.wrap(lambda metrics, checkpoint=None: None)

    def loop(rank: Rank, step: int) -> None:
        if step == 3:
            rank.request_stop()
        rank.reports.should_checkpoint()
        report(metrics, "checkpoint")

    job.run(loop)
    assert rank.stopped is not None and rank.stopped.step == step
    job.close()


def test_a_session_in_the_function_decides_itself(job: Job) -> None:
    """Neither call is a boundary then."""

    def loop(rank: Rank, step: int) -> None:
        rank.worker.has_session = True
        if step == 5 and rank.rank == 0:
            rank.request_stop()
        assert not rank.reports.should_checkpoint()
        rank.report({"step": step}, "checkpoint")

    job.run(loop)
    assert [rank.steps for rank in job.ranks] == [STEPS, STEPS]


def test_outside_ray_it_is_false() -> None:
    assert worker.should_checkpoint() is False
