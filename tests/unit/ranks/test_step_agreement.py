"""The common step with its real threads, and ranks that are threads of one process. `test_step_protocol` checks the
protocol itself, `integration/ranks/test_step_agreement` real processes."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import timedelta
from itertools import count
from pathlib import Path

import pytest

from reprieve.errors import ConfigError, RankFailed, RanksError, StoreLost
from reprieve.ranks import failpoints
from reprieve.ranks.folder_store import FolderStore
from reprieve.ranks.group import Ranks
from reprieve.ranks.step_agreement import Request, StepAgreement
from reprieve.ranks.store import Store
from reprieve.ranks.torch_store import TorchStore
from tests.support.memory_store import MemoryStore

SOON_S = 20.0
"""What a test waits for happens long before this."""


@pytest.fixture(params=["memory", "torch", "folder"])
def any_store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    stores: dict[str, Callable[[], Store]] = {
        "memory": MemoryStore,
        "torch": TorchStore.serve,
        "folder": lambda: FolderStore(tmp_path / "keys"),
    }
    store = stores[request.param]()
    yield store
    store.close()


class Job:
    """A job whose ranks are threads. Its steps contain a barrier, as real steps contain an all-reduce."""

    def __init__(self, world_size: int, store: Store | None = None, *, limit_s: float = 60, stop_limit_s: float = 60):
        self.store = store or MemoryStore()
        self.world_size = world_size
        self.limit = timedelta(seconds=limit_s)
        self.stop_limit = timedelta(seconds=stop_limit_s)
        self.barrier = threading.Barrier(world_size, timeout=SOON_S)
        self.on_lost: list[RanksError] = []
        self._open = ExitStack()

    def join(self, rank: int, completed: int = 0) -> StepAgreement:
        ranks = Ranks(rank, self.world_size, self.store.client(), limit=self.limit)
        common = StepAgreement(ranks, completed=completed, stop_limit=self.stop_limit, on_lost=self.on_lost.append)
        self._open.callback(common.close)
        return common

    def train(self, common: StepAgreement, steps: int = 10**6, completed: int = 0) -> list[Request | RanksError | str]:
        """Train, and return what this rank did besides its steps."""
        did: list[Request | RanksError | str] = []
        try:
            for step in range(completed + 1, completed + steps + 1):
                self.barrier.wait()
                while request := common.boundary(step):
                    did.append(request)
                    if request.kind == "stop":
                        return did
        except RanksError as error:
            return [*did, error]
        common.finish()
        return [*did, "finished"]

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()


class InBackground:
    """A call in its own thread, and its result."""

    def __init__(self, call: Callable[[], object]) -> None:
        self._call = call
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        self.value = self._call()

    @property
    def ended(self) -> bool:
        return not self._thread.is_alive()

    def result(self) -> object:
        self._thread.join(SOON_S)
        assert not self._thread.is_alive()
        return self.value


def eventually(true: Callable[[], object]) -> None:
    end = time.monotonic() + SOON_S
    while not true():
        assert time.monotonic() < end
        time.sleep(0.001)


def at_next_boundary(common: StepAgreement, completed: int) -> Request:
    """Wait at boundaries for a request, on a rank whose steps contain nothing."""
    end = time.monotonic() + SOON_S
    while time.monotonic() < end:
        if request := common.boundary(completed):
            return request
        completed += 1
        time.sleep(0.001)
    raise AssertionError("there was no request")


# All ranks


@pytest.mark.parametrize("kind", ["stop", "save"])
def test_all_ranks_do_it_after_one_step(any_store: Store, kind: str) -> None:
    with Job(3, any_store) as job:
        commons = [job.join(rank) for rank in range(3)]
        threads = [InBackground(lambda common=common: job.train(common, steps=300)) for common in commons]  # type: ignore[misc]
        commons[1].request(kind)
        did = [thread.result() for thread in threads]
    assert did[0] == did[1] == did[2]
    assert isinstance(did[0], list)
    assert did[0][0].kind == kind
    assert did[0][1:] == ([] if kind == "stop" else ["finished"])


def test_the_step_is_counted_from_where_the_run_was_resumed() -> None:
    with Job(2) as job:
        commons = [job.join(rank, completed=1000) for rank in range(2)]
        threads = [InBackground(lambda common=common: job.train(common, completed=1000)) for common in commons]  # type: ignore[misc]
        commons[0].request("stop")
        (first,), (second,) = (thread.result() for thread in threads)  # type: ignore[misc, attr-defined]
    assert first == second
    assert first.step > 1000


def test_saves_for_hours_leave_few_keys() -> None:
    """The time-based schedule of one rank holds for all: each save happens once, on all ranks after the same step."""
    store = MemoryStore()
    with Job(2, store) as job:
        commons = [job.join(rank) for rank in range(2)]

        def train(rank: int) -> list[Request]:
            saves: list[Request] = []
            for step in count(1):
                job.barrier.wait()
                while request := commons[rank].boundary(step):
                    saves.append(request)
                    if rank == 0:
                        commons[0].request("save" if len(saves) < 50 else "stop")
                    if request.kind == "stop":
                        return saves
            raise AssertionError

        threads = [InBackground(lambda rank=rank: train(rank)) for rank in range(2)]  # type: ignore[misc]
        commons[0].request("save")
        first, second = (thread.result() for thread in threads)
        assert first == second
        assert isinstance(first, list)
        assert [request.kind for request in first] == ["save"] * 50 + ["stop"]
        eventually(lambda: sum("/" in key for key in store.keys) < 16)


def test_a_schedule_may_ask_at_every_step_until_it_is_served() -> None:
    with Job(2) as job:
        commons = [job.join(rank) for rank in range(2)]
        for _ in range(10):
            commons[0].request("save")
        eventually(lambda: commons[0]._position.pending and commons[1]._position.pending)
        commons[0].request("save")
        time.sleep(0.05)
        for common in commons:
            assert common.boundary(1) == Request("save", 1)
            assert common.boundary(1) is None
        commons[0].request("save")
        eventually(lambda: commons[0]._position.pending and commons[1]._position.pending)
        assert [common.boundary(2) for common in commons] == [Request("save", 2)] * 2


def test_a_stop_and_a_save_at_the_same_time_are_both_served() -> None:
    with Job(2) as job:
        for _ in range(20):
            commons = [job.join(rank) for rank in range(2)]
            threads = [InBackground(lambda common=common: job.train(common)) for common in commons]  # type: ignore[misc]
            commons[0].request("save")
            commons[1].request("stop")
            first, second = (thread.result() for thread in threads)
            assert first == second
            assert isinstance(first, list)
            assert [request.kind for request in first] in (["save", "stop"], ["stop"])
            for common in commons:
                common.close()
            job.store = MemoryStore()


def test_a_stop_asked_for_twice_and_everywhere_is_served_once() -> None:
    with Job(2) as job:
        commons = [job.join(rank) for rank in range(2)]
        threads = [InBackground(lambda common=common: job.train(common)) for common in commons]  # type: ignore[misc]
        for common in [*commons, *commons]:
            common.request("stop")
        first, second = (thread.result() for thread in threads)
        assert first == second
        assert isinstance(first, list) and len(first) == 1
        for common in commons:
            common.request("stop")
            common.request("save")
        time.sleep(0.05)
        assert [common.boundary(first[0].step) for common in commons] == [None, None]


def test_a_stop_during_a_save_is_served_at_the_same_step() -> None:
    """The training thread reaches no boundary for a long time: no rank gives it up, and no further step runs."""
    with Job(2, stop_limit_s=0.2, limit_s=0.2) as job:
        commons = [job.join(rank) for rank in range(2)]
        saving, saved = threading.Event(), threading.Event()

        def train(rank: int) -> list[Request]:
            did: list[Request] = []
            for step in count(1):
                job.barrier.wait()
                while request := commons[rank].boundary(step):
                    did.append(request)
                    if request.kind == "stop":
                        return did
                    if rank == 1:
                        saving.set()
                        assert saved.wait(SOON_S)
            raise AssertionError

        threads = [InBackground(lambda rank=rank: train(rank)) for rank in range(2)]  # type: ignore[misc]
        commons[0].request("save")
        assert saving.wait(SOON_S)
        commons[0].request("stop")
        time.sleep(0.6)  # three times the limit
        saved.set()
        first, second = (thread.result() for thread in threads)
    assert first == second
    assert isinstance(first, list)
    save, stop = first
    assert (save.kind, stop.kind) == ("save", "stop")
    assert stop.step - save.step <= 1  # one more if rank 0 had started a step before the request


def test_one_long_step_is_no_failure() -> None:
    with Job(2, stop_limit_s=0.2, limit_s=0.2) as job:
        commons = [job.join(rank) for rank in range(2)]
        commons[0].request("stop")
        eventually(lambda: commons[0]._position.pending and commons[1]._position.pending)
        assert commons[0].boundary(1) == Request("stop", 1)
        time.sleep(0.6)  # three times the limit
        assert commons[1].boundary(1) == Request("stop", 1)


# Ranks that have not joined yet, or have left


def test_asked_before_the_others_are_there() -> None:
    """They join after the time that a rank that has joined may take to answer."""
    with Job(3, stop_limit_s=0.1) as job:
        first = job.join(0)
        first.request("stop")
        threads = [InBackground(lambda: job.train(first))]
        time.sleep(0.4)
        for rank in (1, 2):
            common = job.join(rank)
            threads.append(InBackground(lambda common=common: job.train(common)))  # type: ignore[misc]
        assert [thread.result() for thread in threads] == [[Request("stop", 1)]] * 3


def test_a_rank_that_never_joins_is_named() -> None:
    with Job(2, stop_limit_s=0.1, limit_s=0.3) as job:
        common = job.join(0)
        common.request("stop")
        with pytest.raises(RankFailed, match="stopping together: rank 1: did not answer") as failed:
            at_next_boundary(common, 1)
        assert failed.value.rank == 1
        late = job.join(1)
        with pytest.raises(RankFailed, match="rank 1: did not answer"):
            at_next_boundary(late, 1)


def test_a_watcher_that_dies_is_learned_by_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 joins, and its watcher hangs before it publishes. All ranks get the same failure."""
    go_on = threading.Event()
    monkeypatch.setattr(failpoints, "on_reached", lambda name: name.endswith("set 0/started/1") and go_on.wait(SOON_S))
    with Job(3, stop_limit_s=0.3) as job:
        commons = [job.join(rank) for rank in range(3)]
        eventually(lambda: isinstance(job.store, MemoryStore) and "step/joined/1" in job.store.keys)
        begun = time.monotonic()
        commons[2].request("stop")
        for rank in (0, 2):
            with pytest.raises(RankFailed, match="rank 1"):
                at_next_boundary(commons[rank], 1)
        assert time.monotonic() - begun < 10  # not the limit of a minute
        go_on.set()
        with pytest.raises(RankFailed, match="rank 1"):
            at_next_boundary(commons[1], 1)
        eventually(lambda: [getattr(error, "rank", None) for error in job.on_lost] == [1, 1, 1])
        # Raised once for each request. A later request cannot be passed on.
        assert commons[0].boundary(5) is None
        commons[0].request("save")
        with pytest.raises(RankFailed, match="saving together: rank 1"):
            at_next_boundary(commons[0], 6)


def test_a_stop_does_not_wait_for_what_a_save_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank is dead, a pending save has not noticed yet, and a grace period begins."""
    go_on = threading.Event()
    monkeypatch.setattr(failpoints, "on_reached", lambda name: name.endswith("set 0/started/1") and go_on.wait(SOON_S))
    with Job(2, stop_limit_s=0.3, limit_s=60) as job:
        commons = [job.join(rank) for rank in range(2)]
        commons[0].request("save")
        eventually(lambda: commons[0]._position.pending)
        time.sleep(0.5)
        begun = time.monotonic()
        commons[0].request("stop")
        for message in ("saving together: rank 1", "stopping together: rank 1"):
            with pytest.raises(RankFailed, match=message):
                at_next_boundary(commons[0], 1)
        assert time.monotonic() - begun < 10
        go_on.set()


def test_the_last_one_dies_between_its_answer_and_the_decision(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks have answered, so there is a common step, although the rank that should have published it did not."""
    first: list[str] = []
    go_on = threading.Event()

    def stand_still(name: str) -> None:
        if name.endswith("put 0/end") and not first:
            first.append(name)
            go_on.wait(SOON_S)

    monkeypatch.setattr(failpoints, "on_reached", stand_still)
    with Job(2, stop_limit_s=0.2) as job:
        commons = [job.join(rank) for rank in range(2)]
        threads = [InBackground(lambda common=common: at_next_boundary(common, 1)) for common in commons]  # type: ignore[misc]
        commons[0].request("stop")
        eventually(lambda: threads[0].ended or threads[1].ended)
        assert not (threads[0].ended and threads[1].ended)
        go_on.set()
        assert threads[0].result() == threads[1].result()


def test_a_rank_that_has_finished_answers_until_it_is_closed() -> None:
    """It finished after its last step, so the others do too: all finish, and no rank stops."""
    with Job(2, stop_limit_s=0.2) as job:
        commons = [job.join(rank) for rank in range(2)]
        assert commons[0].boundary(1) is None
        commons[0].finish()
        commons[1].request("stop")
        eventually(lambda: commons[1]._position.pending)
        assert commons[1].boundary(1) is None
        commons[1].finish()


def test_a_rank_that_has_closed_is_not_waited_for() -> None:
    with Job(3, stop_limit_s=30) as job:
        commons = [job.join(rank) for rank in range(3)]
        begun = time.monotonic()
        commons[1].close()
        commons[0].request("stop")
        two = InBackground(lambda: at_next_boundary(commons[2], 1))
        assert at_next_boundary(commons[0], 1).kind == "stop"
        assert isinstance(two.result(), Request)
        assert time.monotonic() - begun < 10


def test_a_rank_that_closes_while_it_is_asked_is_not_waited_for() -> None:
    for number in range(100):
        with Job(2, stop_limit_s=30) as job:
            commons = [job.join(rank) for rank in range(2)]
            begun = time.monotonic()
            commons[0].request("stop")
            time.sleep(0.00002 * number)
            commons[1].close()
            assert at_next_boundary(commons[0], 1).kind == "stop"
            assert time.monotonic() - begun < 10


def test_all_close_and_nothing_is_left_behind(any_store: Store) -> None:
    before = threading.active_count()
    with Job(3, any_store) as job:
        commons = [job.join(rank) for rank in range(3)]
        begun = time.monotonic()
        for common in commons:
            common.close()
            common.close()
        assert time.monotonic() - begun < 5
    assert not [thread for thread in threading.enumerate() if "common step" in thread.name]
    eventually(lambda: threading.active_count() <= before + 3 * 3)


# The store is lost


class Breakable(MemoryStore):
    """A store whose connections can all be cut at once."""

    def __init__(self, shared: Breakable | None = None) -> None:
        super().__init__(shared)
        self._all: list[Breakable] = shared._all if shared else []
        self._all.append(self)

    def client(self) -> Breakable:
        return Breakable(self)

    def die(self) -> None:
        for store in self._all:
            store.close()


def test_a_lost_store_does_not_disturb_training_until_somebody_asks(caplog: pytest.LogCaptureFixture) -> None:
    store = Breakable()
    with Job(2, store) as job, caplog.at_level(logging.WARNING, "reprieve"):
        commons = [job.join(rank) for rank in range(2)]
        eventually(lambda: {"step/joined/0", "step/joined/1"} <= store.keys.keys())
        store.die()
        eventually(lambda: len(job.on_lost) == 2)
        assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]
        assert [commons[0].boundary(step) for step in range(1, 10)] == [None] * 9
        for kind in ("save", "stop"):
            commons[0].request(kind)
            with pytest.raises(StoreLost, match="closed here"):
                at_next_boundary(commons[0], 10)
            assert commons[0].boundary(11) is None
        assert commons[1].boundary(1) is None
        assert len(job.on_lost) == 2


def test_what_others_do_when_it_is_lost_is_their_affair(caplog: pytest.LogCaptureFixture) -> None:
    store = Breakable()

    def raises(error: RanksError) -> None:
        raise RuntimeError("from the callback")

    with StepAgreement(Ranks(0, 2, store), completed=0, on_lost=raises) as common:
        eventually(lambda: "step/joined/0" in store.keys)
        store.die()
        eventually(lambda: "on_lost failed" in caplog.text)
        common.request("stop")
        with pytest.raises(StoreLost):
            at_next_boundary(common, 1)


def test_the_store_is_lost_while_the_common_step_is_looked_for() -> None:
    store = Breakable()
    with Job(2, store) as job:
        common = job.join(0)
        common.request("stop")
        eventually(lambda: common._position.pending)
        standing = InBackground(lambda: job.train(common))
        job.barrier.wait()  # in place of rank 1, which has not joined
        time.sleep(0.05)
        assert not standing.ended
        store.die()
        (error,) = standing.result()  # type: ignore[misc, attr-defined]
        assert isinstance(error, StoreLost)


# A world of one, and requests from anywhere


def test_alone() -> None:
    with StepAgreement(Ranks.alone(), completed=4) as common:
        assert common.boundary(4) is None  # before the first step
        assert common.boundary(5) is None
        common.request("save")
        common.request("save")
        assert common.boundary(6) == Request("save", 6)
        assert common.boundary(6) is None
        common.request("save")
        common.request("stop")
        common.request("stop")
        assert common.boundary(7) == Request("save", 7)
        assert common.boundary(7) == Request("stop", 7)
        common.request("stop")
        assert common.boundary(7) is None
        assert common.boundary(8) is None


def test_only_known_kinds() -> None:
    with StepAgreement(Ranks.alone(), completed=0) as common, pytest.raises(ConfigError, match="'pause'"):
        common.request("pause")


def test_a_signal_handler_may_ask_at_any_moment() -> None:
    """A signal handler may request while its thread holds the lock, at a boundary."""
    with Job(2) as job:
        commons = [job.join(rank) for rank in range(2)]
        previous = signal.signal(signal.SIGALRM, lambda *_: commons[0].request("save"))
        try:
            other = InBackground(lambda: _saves(commons[1], 10))
            signal.setitimer(signal.ITIMER_REAL, 0.002, 0.002)
            own_saves = _saves(commons[0], 10)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, previous)
        commons[0].finish()
        assert len(own_saves) == 10
        assert other.result()


def _saves(common: StepAgreement, number: int) -> list[Request]:
    """Serve saves until there were so many, or the other rank has finished."""
    saves: list[Request] = []
    end = time.monotonic() + SOON_S
    for step in count(1):
        if request := common.boundary(step):
            saves.append(request)
        if len(saves) == number or time.monotonic() > end:
            return saves
    raise AssertionError
