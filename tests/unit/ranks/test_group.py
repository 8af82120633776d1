"""Agreements: one outcome on all ranks, whatever happens to any of them. Ranks are threads here, over every store."""

from __future__ import annotations

import contextlib
import itertools
import pickle
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from reprieve.errors import RankFailed, RanksError, ReprieveError, StoreLost
from reprieve.ranks import failpoints, group
from reprieve.ranks.folder_store import FolderStore
from reprieve.ranks.group import Ranks
from reprieve.ranks.store import Store, prefixed
from reprieve.ranks.torch_store import TorchStore
from tests.support.memory_store import MemoryStore

LIMIT = timedelta(seconds=20)
SHORT = timedelta(milliseconds=150)

Outcome = Any
"""What a rank's function returned, or the exception that it raised."""


@pytest.fixture(params=["memory", "torch", "folder"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    made: Store
    if request.param == "folder":
        made = FolderStore(tmp_path / "keys")
    elif request.param == "torch":
        made = TorchStore.serve()
    else:
        made = MemoryStore()
    yield made
    made.close()


def together(store: Store, count: int, work: Callable[[Ranks], Any], *, limit: timedelta = LIMIT) -> list[Outcome]:
    """Run `work` as each of `count` ranks, at the same time."""

    def run(rank: int) -> Outcome:
        ranks = Ranks(rank, count, store.client(), limit=limit)
        try:
            return work(ranks)
        except Exception as error:  # noqa: BLE001 - compared with the other ranks'
            return error
        finally:
            ranks.close()

    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(run, range(count)))


def raises(error: BaseException) -> Any:
    raise error


# All ranks arrive


def test_results_by_rank(store: Store) -> None:
    begun = time.monotonic()
    results = together(store, 3, lambda ranks: ranks.agree("work", lambda: {"rank": ranks.rank, "b": b"\0\xff"}))
    assert time.monotonic() - begun < 10
    assert results == [[{"rank": rank, "b": b"\0\xff"} for rank in range(3)]] * 3


@pytest.mark.parametrize(
    "value", [None, True, 1.5, "ä", [], {}, b"", [b"a", {"b": [b"c"]}], {"bytes": "x"}, 2**62, float("inf")]
)
def test_values_that_ranks_can_tell_each_other(value: Any) -> None:
    assert together(MemoryStore(), 2, lambda ranks: ranks.agree("work", lambda: value)) == [[value, value]] * 2


def test_no_work_is_a_barrier(store: Store) -> None:
    passed: list[int] = []

    def work(ranks: Ranks) -> Any:
        if ranks.rank == 1:
            time.sleep(0.2)
            passed.append(ranks.rank)
        assert ranks.agree("barrier") == [None] * 3
        return list(passed)

    assert together(store, 3, work) == [[1]] * 3


def test_many_after_one_another(store: Store) -> None:
    def work(ranks: Ranks) -> Any:
        return [ranks.agree("work", lambda number=number: number * 10 + ranks.rank) for number in range(30)]

    assert together(store, 3, work) == [[[n * 10, n * 10 + 1, n * 10 + 2] for n in range(30)]] * 3


def test_different_names_from_two_threads_at_once(store: Store) -> None:
    """Every rank uses the names in another order."""

    def work(ranks: Ranks) -> Any:
        def many(name: str) -> list[list[str]]:
            return [ranks.agree(name, lambda number=number: f"{name} {number} {ranks.rank}") for number in range(20)]

        with ThreadPoolExecutor(2) as threads:
            return dict(zip("ab", threads.map(many, random.sample("ab", 2) if ranks.rank else "ab"), strict=True))

    got = together(store, 3, work)
    want = {name: [[f"{name} {n} {rank}" for rank in range(3)] for n in range(20)] for name in "ab"}
    assert [{rows[0][0][0]: rows for rows in results.values()} for results in got] == [want] * 3


def test_large_results(store: Store) -> None:
    """Together they are larger than one message to the store may be."""
    size = 3_000_000
    assert (
        together(store, 3, lambda ranks: [len(some) for some in ranks.agree("work", lambda: bytes(size))])
        == [[size] * 3] * 3
    )


def test_alone_needs_no_store() -> None:
    ranks = Ranks.alone()
    assert (ranks.rank, ranks.world_size) == (0, 1)
    assert ranks.agree("work", lambda: (1, object)) == [(1, object)]
    assert ranks.agree("work") == [None]
    with pytest.raises(ZeroDivisionError):
        ranks.agree("work", lambda: 1 / 0)
    with pytest.raises(RanksError, match="no store"):
        _ = ranks.store
    assert ranks.scoped("deeper").agree("work", lambda: 1) == [1]
    ranks.close()


def test_bad_worlds_are_refused() -> None:
    with pytest.raises(RanksError, match="no rank 3 among 3"):
        Ranks(3, 3, MemoryStore())
    with pytest.raises(RanksError, match="need a store"):
        Ranks(0, 3, None)


# A rank fails


def test_a_failure_is_everybodys(store: Store) -> None:
    def work(ranks: Ranks) -> Any:
        return ranks.agree("save", lambda: raises(OSError(28, "No space left")) if ranks.rank == 1 else 1)

    first, own, last = together(store, 3, work)
    assert isinstance(own, OSError)
    for error in (first, last):
        assert isinstance(error, RankFailed)
        assert isinstance(error, ReprieveError)
        assert (error.rank, error.reason) == (1, "OSError: [Errno 28] No space left")
        assert str(error) == "save: rank 1: OSError: [Errno 28] No space left"
        assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_the_others_hear_of_it_at_once(store: Store) -> None:
    def work(ranks: Ranks) -> Any:
        begun = time.monotonic()
        with pytest.raises((ZeroDivisionError, RankFailed)):
            ranks.agree("work", lambda: 1 / 0 if ranks.rank == 2 else 0)
        return time.monotonic() - begun

    assert max(together(store, 3, work)) < 5


def test_all_fail_each_with_its_own(store: Store) -> None:
    begun = threading.Barrier(3)
    errors = together(
        store, 3, lambda ranks: ranks.agree("work", lambda: (begun.wait(), raises(ValueError(ranks.rank))))
    )
    assert [(type(error), error.args) for error in errors] == [(ValueError, (rank,)) for rank in range(3)]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(143)])
def test_what_is_no_exception_fails_too(error: BaseException) -> None:
    def work(ranks: Ranks) -> Any:
        if ranks.rank == 0:
            with pytest.raises(type(error)):
                ranks.agree("work", lambda: raises(error))
            return None
        return ranks.agree("work")

    _, other = together(MemoryStore(), 2, work)
    assert other.reason.startswith(type(error).__name__)


def test_a_result_that_cannot_be_told_is_a_failure() -> None:
    own, other = together(MemoryStore(), 2, lambda ranks: ranks.agree("work", lambda: object if ranks.rank == 0 else 0))
    assert isinstance(own, TypeError)
    assert (other.rank, "cannot exchange" in other.reason) == (0, True)


def test_storage_that_fails_after_another_ranks_failure_is_no_news(store: Store) -> None:
    """For example files that were removed because of that failure: its reason says more."""

    def work(ranks: Ranks, later: Exception) -> Any:
        def fail() -> None:
            begun.wait()
            if ranks.rank == 0:
                raise ValueError("first")
            time.sleep(0.5)
            raise later

        begun = barriers[str(later)]
        return ranks.agree("work", fail)

    barriers = {"gone": threading.Barrier(2), "bad": threading.Barrier(2)}
    first, other = together(store, 2, lambda ranks: work(ranks, FileNotFoundError("gone")))
    assert (str(first), str(other), str(other.__cause__)) == ("first", "work: rank 0: ValueError: first", "gone")
    first, other = together(prefixed(store, "again"), 2, lambda ranks: work(ranks, TypeError("bad")))
    assert (str(first), str(other)) == ("first", "bad")


def test_after_a_failure_the_next_one_works(store: Store) -> None:
    def work(ranks: Ranks) -> Any:
        got: list[Any] = []
        for number in range(6):
            try:
                got.append(ranks.agree("work", lambda number=number: 1 / (number % 3 - ranks.rank)))
            except (ZeroDivisionError, RankFailed) as error:
                got.append(type(error).__name__)
        return got

    for rank, got in enumerate(together(store, 3, work)):
        assert got == [("ZeroDivisionError" if n % 3 == rank else "RankFailed") for n in range(6)]
    assert together(prefixed(store, "other"), 3, lambda ranks: ranks.agree("work")) == [[None] * 3] * 3


# A rank does not arrive


def test_those_who_do_not_come_are_named(store: Store) -> None:
    def work(ranks: Ranks) -> Any:
        return ranks.agree("save") if ranks.rank in (0, 2) else None

    errors = together(store, 4, work, limit=SHORT)
    for error in (errors[0], errors[2]):
        assert isinstance(error, RankFailed)
        assert error.rank is None
        assert str(error) == "save: ranks 1, 3 did not arrive within 0.15 s"


def test_a_late_rank_hears_the_same_and_does_not_begin(store: Store) -> None:
    begun = []

    def work(ranks: Ranks) -> Any:
        if ranks.rank == 1:
            time.sleep(1)
        return ranks.agree("save", lambda: begun.append(ranks.rank))

    errors = together(store, 3, work, limit=SHORT)
    assert [str(error) for error in errors] == ["save: rank 1: did not arrive within 0.15 s"] * 3
    assert [error.rank for error in errors] == [1, 1, 1]
    assert sorted(begun) == [0, 2]


def test_a_rank_that_is_late_with_its_work_hears_the_same(store: Store) -> None:
    def work(ranks: Ranks) -> Any:
        return ranks.agree("save", lambda: time.sleep(1 if ranks.rank == 1 else 0))

    assert [str(error) for error in together(store, 3, work, limit=SHORT)] == [
        "save: rank 1: did not arrive within 0.15 s"
    ] * 3


def test_a_late_failure_is_its_own(store: Store) -> None:
    def fail_late(ranks: Ranks) -> None:
        if ranks.rank == 1:
            time.sleep(1)
            raise ValueError("late")

    first, late = together(store, 2, lambda ranks: ranks.agree("save", lambda: fail_late(ranks)), limit=SHORT)
    assert (type(late), first.reason) == (ValueError, "did not arrive within 0.15 s")


def test_each_call_may_have_a_limit_of_its_own() -> None:
    def work(ranks: Ranks) -> Any:
        if ranks.rank == 0:
            begun = time.monotonic()
            with pytest.raises(RankFailed, match=r"within 0.15 s"):
                ranks.agree("work", limit=SHORT)
            return time.monotonic() - begun
        return 0

    assert max(together(MemoryStore(), 2, work)) < 5


def test_the_last_one_dies_before_it_can_say_that_it_was_the_last() -> None:
    """Every rank has published: that is a success, and the first rank whose time runs out writes it."""

    class Dies(MemoryStore):
        def add(self, key: str, amount: int) -> int:
            return super().add(key, amount) if threading.current_thread() is not dying else raises(StoreLost("dead"))

        def client(self) -> MemoryStore:
            return Dies(self)

    store = Dies()

    def die() -> None:
        with pytest.raises(StoreLost):
            Ranks(2, 3, store.client()).agree("work")

    dying = threading.Thread(target=die)
    dying.start()
    dying.join()
    results = together(store, 3, lambda ranks: ranks.agree("work") if ranks.rank < 2 else None, limit=SHORT)
    assert results[:2] == [[None] * 3] * 2


@pytest.mark.parametrize(("kind", "repeats"), [("memory", 400), ("torch", 60), ("folder", 40)])
def test_time_running_out_races_the_last_arrival(kind: str, repeats: int, tmp_path: Path) -> None:
    """Whichever rank wins, all ranks see the same outcome, and every kind of outcome occurs."""
    store: Store = {"memory": MemoryStore, "torch": TorchStore.serve, "folder": lambda: FolderStore(tmp_path)}[kind]()
    chance = random.Random(7)
    seen = set()
    for repeat in range(repeats):
        delays = [chance.uniform(0, 0.004), chance.uniform(0, 0.004), 0.012 + chance.uniform(-0.004, 0.004)]
        limits = [timedelta(milliseconds=chance.uniform(6, 12)) for _ in delays]

        def work(ranks: Ranks, delays: list[float] = delays, limits: list[timedelta] = limits) -> Any:
            time.sleep(delays[ranks.rank])
            return ranks.agree("race", lambda: ranks.rank, limit=limits[ranks.rank])

        outcomes = [
            outcome if isinstance(outcome, list) else str(outcome)
            for outcome in together(prefixed(store, str(repeat)), 3, work)
        ]
        assert outcomes[0] == outcomes[1] == outcomes[2], (repeat, outcomes)
        seen.add(str(outcomes[0])[:5])
    store.close()
    assert seen == {"[0, 1", "race:"}


def test_failure_time_out_and_arrival_race() -> None:
    chance = random.Random(11)
    seen = set()
    for _ in range(300):
        store = MemoryStore()
        delays = [chance.uniform(0, 0.006) for _ in range(3)]

        def act(ranks: Ranks, delays: list[float] = delays) -> int:
            time.sleep(delays[ranks.rank])
            return 1 // (0 if ranks.rank == 1 else 1)

        outcomes = together(
            store, 3, lambda ranks: ranks.agree("race", lambda: act(ranks)), limit=timedelta(milliseconds=3)
        )
        assert isinstance(outcomes[1], ZeroDivisionError | RankFailed)
        assert str(outcomes[0]) == str(outcomes[2])
        seen.add(str(outcomes[0]))
    assert len(seen) > 2


# A long run


def test_a_thousand_operations_leave_few_keys() -> None:
    store = MemoryStore()
    most = 0

    def work(ranks: Ranks) -> None:
        nonlocal most
        for number in range(1000):
            name = f"name {number % 2}"
            with contextlib.suppress(ZeroDivisionError, RankFailed):
                ranks.agree(name, lambda number=number: 1 / 0 if number % 10 == ranks.rank else None)
            most = max(most, len(store.keys))

    assert together(store, 3, work) == [None] * 3
    per_operation = 3 + 2
    assert most <= 2 * 4 * per_operation, sorted(store.keys)


def test_torchs_store_stays_small() -> None:
    store = TorchStore.serve()
    before = store.key_count()

    def work(ranks: Ranks) -> None:
        for _ in range(100):
            ranks.agree("work")
            if ranks.rank == 0:
                ranks.send("letter", 1, b"text")
            if ranks.rank == 1:
                ranks.receive("letter", 0)

    assert together(store, 2, work) == [None] * 2
    assert store.key_count() - before <= 3 * 4
    store.close()


def test_an_outcome_stays_until_every_rank_has_read_it() -> None:
    """A rank hangs after its arrival while the others continue, and one of them fails repeatedly."""
    store = MemoryStore()
    rest_is_done = threading.Event()

    class Stands(MemoryStore):
        def wait(self, key: str, limit: timedelta) -> bytes | None:
            assert rest_is_done.wait(20)
            return super().wait(key, limit)

    def work(ranks: Ranks) -> Any:
        if ranks.rank == 1:
            stands = Stands(store)
            return Ranks(1, 3, stands, limit=SHORT).agree("work", lambda: "one")
        time.sleep(0.2)
        outcome = ranks.agree("work", lambda: ranks.rank)
        for _ in range(5):
            with pytest.raises((ZeroDivisionError, RankFailed)):
                ranks.agree("work", lambda: 1 / (ranks.rank - 2))
        if ranks.rank == 0:
            rest_is_done.set()
        return outcome

    assert together(store, 3, work) == [[0, "one", 2]] * 3


# The rest


def test_letters_come_in_order(store: Store) -> None:
    def work(ranks: Ranks) -> Any:
        if ranks.rank == 0:
            for number in range(5):
                ranks.send("numbers", 1, b"%d" % number)
            return ranks.receive("answer", 1)
        got = [ranks.receive("numbers", 0) for _ in range(5)]
        ranks.send("answer", 0, b"".join(got))
        return got

    assert together(store, 2, work) == [b"01234", [b"0", b"1", b"2", b"3", b"4"]]


def test_a_letter_that_does_not_come() -> None:
    ranks = Ranks(1, 2, MemoryStore())
    with pytest.raises(RankFailed, match=r"news: rank 0: sent nothing to rank 1 within 0.15 s") as failure:
        ranks.receive("news", 0, limit=SHORT)
    assert failure.value.rank == 0


def test_scopes_count_for_themselves(store: Store) -> None:
    def work(ranks: Ranks) -> Any:
        ranks.agree("work")
        inner = ranks.scoped("attempt 1")
        got = [inner.agree("work", lambda: 1), ranks.scoped("attempt 2").agree("work", lambda: 2)]
        got.append(inner.scoped("deep").agree("work", lambda: 3))
        inner.store.put_once("key", b"value")
        inner.agree("work")
        assert ranks.store.get("attempt 1/key") == b"value"
        return got

    assert together(store, 2, work) == [[[1, 1], [2, 2], [3, 3]]] * 2


def test_closed_ranks_are_lost(store: Store) -> None:
    ranks = Ranks(0, 2, store.client())
    ranks.close()
    with pytest.raises(StoreLost):
        ranks.agree("work")
    with ThreadPoolExecutor(1) as thread, pytest.raises(StoreLost):
        thread.submit(ranks.agree, "work").result()


def test_closing_ends_what_waits_in_other_threads() -> None:
    store = TorchStore.serve()
    ranks = Ranks(0, 2, store.client())
    with ThreadPoolExecutor(1) as thread:
        waits = thread.submit(ranks.agree, "work")
        time.sleep(0.2)
        ranks.close()
        with pytest.raises(StoreLost):
            waits.result(10)
    store.close()


def test_who_serves_the_store_leaves_last(store: Store) -> None:
    ended = []

    def work(ranks: Ranks) -> None:
        own = Ranks(ranks.rank, 3, store.client(), serves=ranks.rank == 0)
        time.sleep(ranks.rank * 0.2)
        own.close()
        ended.append(ranks.rank)
        own.close()
        own.scoped("deeper").close()

    assert together(prefixed(store, "other"), 3, work) == [None] * 3
    assert ended[0] == 1
    assert sorted(ended) == [0, 1, 2]
    assert ended.index(0) > 0


def test_who_serves_the_store_does_not_wait_for_ever(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "LEAVE_LIMIT", SHORT)
    begun = time.monotonic()
    Ranks(0, 2, store.client(), serves=True).close()
    assert 0.1 < time.monotonic() - begun < 5


def test_connections_end_with_their_threads() -> None:
    store = TorchStore.serve()
    ranks = Ranks(0, 2, store)
    for _ in range(3):
        thread = threading.Thread(target=lambda: ranks.store.set("key", b"value"))
        thread.start()
        thread.join()
    assert ranks._connections is not None
    assert len(ranks._connections._all) == 1
    ranks.close()


def test_points_are_passed_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    passed: list[str] = []
    monkeypatch.setattr(failpoints, "on_reached", passed.append)
    Ranks.alone().agree("save", lambda: passed.append("work"))
    assert passed == ["before save", "work", "publish save", "after save"]
    passed.clear()
    together(MemoryStore(), 2, lambda ranks: ranks.agree("save", lambda: passed.append("work")))
    assert sorted(passed) == sorted(["before save", "work", "publish save", "after save"] * 2)
    assert [name for name, _ in itertools.groupby(passed)][-1] == "after save"
    passed.clear()
    together(MemoryStore(), 2, lambda ranks: ranks.agree("save", lambda: 1 // ranks.rank))
    assert passed.count("after save") == 1


def test_a_failure_at_a_point_is_a_failure_of_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    local = threading.local()
    monkeypatch.setattr(failpoints, "on_reached", lambda name: local.fail(name))  # noqa: PLW0108 - another in each thread

    def work(ranks: Ranks) -> Any:
        local.fail = lambda name: raises(OSError("here")) if ranks.rank and name == "publish save" else None
        return ranks.agree("save")

    other, own = together(MemoryStore(), 2, work)
    assert (str(own), other.reason) == ("here", "OSError: here")
