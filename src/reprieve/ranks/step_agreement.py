"""One common step for all ranks: whoever is asked to stop or to save, all do it after the same step.

Between a request (a signal, a schedule) and the training loop. The protocol is `step_protocol`; this runs it: a watcher
thread that sits in the store until somebody asks, a talker thread that passes on what is asked here, and
`boundary`, which the training thread calls between two steps. While nobody asks, that is one look at memory under a
lock, about 1 µs; nothing is sent, and there is never a collective.
"""

from __future__ import annotations

import itertools
import json
import logging
import queue
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from types import TracebackType
from typing import Any, NamedTuple

from reprieve.console import ONE_RANK
from reprieve.errors import ConfigError, RankFailed, RanksError, StoreLost
from reprieve.failpoints import reached
from reprieve.ranks import step_protocol as protocol
from reprieve.ranks.group import Ranks
from reprieve.ranks.step_protocol import (
    SAVE,
    STOP,
    AgreementFailure,
    Operation,
    Patience,
    PendingRequest,
    Program,
    RankPosition,
    Verdict,
)
from reprieve.ranks.store import Store, prefixed

log = logging.getLogger("reprieve")

STOP_LIMIT = timedelta(seconds=15)
"""Half of the 30 s that Kubernetes, and torchrun after the first rank has ended, leave by default. A watcher does
nothing but answer, and takes milliseconds; seconds, while something holds the interpreter's lock."""

_FOREVER = timedelta(days=3650)


class Request(NamedTuple):
    """What all ranks do now, after the same step."""

    kind: str
    """`stop` or `save`."""

    step: int
    """How many steps are completed."""


class StepAgreement:
    """The ranks of a job, as far as they stop and save together. Every rank makes one, with the same `completed`.

    The training thread calls `boundary` after every step, and starts the next only when that returned None. After it
    has served a request it asks again:

        while request := common.boundary(step):
            save(step)
            if request.kind == "stop":
                raise Preempted

    All that belongs to a step may be done before its boundary, a save of its own included: a stop that comes
    meanwhile is served right there.
    """

    def __init__(
        self,
        ranks: Ranks,
        *,
        completed: int,
        stop_limit: timedelta = STOP_LIMIT,
        on_lost: Callable[[RanksError], object] | None = None,
        on_stop: Callable[[], object] | None = None,
    ) -> None:
        """`completed`: how many steps were done before, from a checkpoint; the same on every rank.

        `stop_limit`: how long a rank may take to answer when a stop is asked for. It is long dead before `ranks.limit`,
        which holds for saves and for ranks that have not joined yet, and which no grace period would last.
        `on_lost`: called once, on a background thread, when the ranks cannot agree on anything any more.
        `on_stop`: called on a background thread when a stop is asked for, by whatever rank; not in a world of one.
        """
        self._rank = ranks.rank
        self._world_size = ranks.world_size
        self._limits = {
            Patience.FOREVER: _FOREVER,
            Patience.PROMPT: min(stop_limit, ranks.limit) / 2,  # waited for twice
            Patience.LONG: ranks.limit / 2,
            Patience.LATE: ranks.limit,
        }
        self._on_lost = on_lost
        self._on_stop = on_stop
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        # The first step is started without asking; where a boundary comes before it, one step more is run.
        self._position = RankPosition(started=completed + 1)
        self._failure: AgreementFailure | None = None
        self._closing = False
        self._stop_asked: float | None = None
        self._save_asked = False
        # Not a queue.Queue: a signal handler may call `request` while this thread holds any lock.
        self._mail: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._alone = ranks.world_size == 1
        self._stores: list[Store] = []
        self._threads: list[threading.Thread] = []
        if not self._alone:
            for name, work in (("watcher", self._watch), ("talker", self._talk)):
                store = prefixed(ranks.store.client(), "step")
                self._stores.append(store)
                self._threads.append(
                    threading.Thread(target=work, args=(store,), name=f"reprieve common step {name}", daemon=True)
                )
            for thread in self._threads:
                thread.start()

    def request(self, kind: str) -> None:
        """Have all ranks `stop` or `save` after the next step that they have in common.

        From any thread, a signal handler included, at any time; returns at once. A stop is served once, however often
        it is asked for, and after it nothing else is. A save that was asked for here and not served yet is not asked
        for again: a schedule may ask at every step for which it is due.
        """
        if kind not in (STOP, SAVE):
            raise ConfigError(f"ranks can be asked to {STOP!r} or to {SAVE!r}, not to {kind!r}")
        if kind == SAVE:
            if self._save_asked:
                return
            self._save_asked = True
        self._mail.put(kind)

    def boundary(self, completed: int) -> Request | None:
        """The training thread, after `completed` steps. None: start the next step. Otherwise all ranks do what is
        asked here, after this same step; then ask again.

        Waits only if something has been asked for and the common step is not known yet: milliseconds, or until a
        rank that does not answer is given up. Then it raises, once for each request, `RankFailed` on all ranks,
        `StoreLost` where the store is gone. No step has been started, and this rank's state is that of `completed`.
        """
        if self._alone:
            if self._mail.empty() and not self._position.asked:
                return None  # at every step: there is nobody who would have to know of it
            self._serve_own_mail()
        with self._lock:
            self._position, verdict = self._position.boundary(completed)
        if verdict is Verdict.GO:
            return None
        if not isinstance(verdict, PendingRequest):
            verdict = self._hold(completed)
        if isinstance(verdict, PendingRequest):
            if verdict.kind == SAVE:
                self._save_asked = False
            if isinstance(verdict.outcome, AgreementFailure):
                raise _error(verdict.outcome, verdict.kind)
            return Request(verdict.kind, completed)
        return None

    @property
    def agreed(self) -> int | None:
        """After which step the ranks will serve what was asked for last; None: that is not known, or served."""
        asked = self._position.asked
        outcome = asked[-1].outcome if asked else None
        return outcome if isinstance(outcome, int) else None

    def finish(self) -> None:
        """This rank runs no more steps. It still answers the others until it is closed."""
        with self._lock:
            self._position = self._position.finish()

    def close(self) -> None:
        """Leave: nobody waits for this rank any more. Waits for no other rank."""
        with self._changed:
            self._position = self._position.finish()
            already, self._closing = self._closing, True
            self._changed.notify_all()
        if already or not self._threads:
            return
        watcher, talker = self._threads
        self._mail.put(None)
        talker.join()
        self._stores[0].close()  # ends its wait
        watcher.join()

    def __enter__(self) -> StepAgreement:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    # The training thread

    def _hold(self, completed: int) -> Verdict | PendingRequest:
        # No limit of its own: the watcher has one, and whatever ends it settles the request.
        with self._changed:
            while True:
                self._position, verdict = self._position.boundary(completed)
                if verdict is not Verdict.HOLD:
                    return verdict
                self._changed.wait()

    def _serve_own_mail(self) -> None:
        """In a world of one the common step is this one."""
        with self._lock:
            while not self._mail.empty():
                kind = self._mail.get()
                if kind is not None and not self._position.over:
                    self._position = self._position.freeze(kind).settle(self._position.started)

    # The background threads. No collectives here: the training thread may be in one, or wait for a dead rank in it.

    def _watch(self, store: Store) -> None:
        try:
            for generation in itertools.count():
                if not self._run(store, protocol.watch(self._rank, self._world_size, generation)):
                    break
        except Exception as error:  # noqa: BLE001 - whatever it is: the training thread must not wait for a thread that has ended
            self._fail(AgreementFailure(lost=_reason(error)))
        finally:
            store.close()

    def _talk(self, store: Store) -> None:
        try:
            store.set(f"joined/{self._rank}", b"1")
        except Exception as error:  # noqa: BLE001 - as above
            self._fail(AgreementFailure(lost=_reason(error)))
        while (kind := self._mail.get()) is not None:
            if kind == STOP and self._stop_asked is None:
                self._stop_asked = time.monotonic()
            asked = False
            try:
                asked = self._run(store, protocol.ask(kind))
            except Exception as error:  # noqa: BLE001 - as above
                self._fail(AgreementFailure(lost=_reason(error)))
            if not asked and self._failure is not None:
                with self._changed:
                    self._position = self._position.refuse(kind, self._failure)
                    self._changed.notify_all()
        try:
            if self._failure is None:
                with self._lock:
                    position = self._position
                self._run(store, protocol.leave(self._rank, max(position.generation - 1, 0), position.started))
        except Exception as error:  # noqa: BLE001 - nobody can be told any more
            log.debug("rank %d could not say that it leaves: %s", self._rank, error)
        finally:
            store.close()

    def _fail(self, failure: AgreementFailure) -> None:
        """There is no common step any more. While nobody has asked for one, training is not disturbed."""
        with self._changed:
            first = self._failure is None and not self._closing
            self._failure = self._failure or failure
            self._position = self._position.settle(failure)
            self._changed.notify_all()
        if first:
            error = _error(failure)
            log.warning(
                "%s (seen by rank %d). From now on the ranks cannot stop or save together",
                error,
                self._rank,
                extra=ONE_RANK,
            )
            if self._on_lost is not None:
                try:
                    self._on_lost(error)
                except Exception:  # theirs; our threads go on
                    log.exception("on_lost failed")

    def _run(self, store: Store, program: Program) -> Any:
        """Do what the program says; what it returns."""
        result: Any = None
        while True:
            try:
                operation = program.send(result)
            except StopIteration as end:
                return end.value
            result = self._do(store, operation)

    def _do(self, store: Store, operation: Operation) -> Any:
        match operation:
            case protocol.Set(key, value):
                reached(f"common step: set {key}")
                store.set(key, _encode(value))
            case protocol.Add(key, amount):
                return store.add(key, amount)
            case protocol.PutOnce(key, value):
                reached(f"common step: put {key}")
                return _decode(store.put_once(key, _encode(value)))
            case protocol.Wait(key, patience):
                return _decode(self._wait(store, key, patience))
            case protocol.Collect(generation):
                return [self._answer(store, generation, rank) for rank in range(self._world_size)]
            case protocol.Forget(generation):
                answers = (f"started/{rank}" for rank in range(self._world_size))
                for name in ("request", "arrived", *answers, "end"):
                    store.delete(f"{generation}/{name}")
            case protocol.Freeze(kind):
                with self._changed:
                    self._position = self._position.freeze(kind)
                    self._changed.notify_all()
                    started = self._position.started
                if kind == STOP and self._on_stop is not None:
                    self._on_stop()
                return started
            case protocol.Settle(outcome):
                if isinstance(outcome, AgreementFailure):
                    self._fail(outcome)
                else:
                    with self._changed:
                        self._position = self._position.settle(outcome)
                        self._changed.notify_all()
            case protocol.Current():
                with self._lock:
                    ended = self._position.over or self._closing or self._failure is not None
                    return None if ended else self._position.generation
            case protocol.Heard(generation):
                with self._changed:
                    self._changed.wait_for(
                        lambda: self._position.generation > generation or self._closing or self._failure is not None
                    )
                    return self._position.kind
        return None

    def _wait(self, store: Store, key: str, patience: Patience) -> bytes | None:
        if patience is not Patience.LONG:
            return store.wait(key, self._limits[patience])
        # What a save waits for may be dead. When a stop is asked for here meanwhile, time is short for both.
        begun = time.monotonic()
        end = begun + self._limits[Patience.LONG].total_seconds()
        prompt = self._limits[Patience.PROMPT].total_seconds()
        while True:
            if self._stop_asked is not None:
                end = min(end, max(begun, self._stop_asked) + prompt)
            left = end - time.monotonic()
            value = store.wait(key, timedelta(seconds=max(0.0, min(left, prompt / 4))))
            if value is not None or left <= 0:
                return value

    def _answer(self, store: Store, generation: int, rank: int) -> int | protocol.Silent:
        for key in (f"{generation}/started/{rank}", f"left/{rank}"):
            if (value := store.get(key)) is not None:
                return int(value)
        return protocol.Silent.ABSENT if store.get(f"joined/{rank}") is None else protocol.Silent.JOINED


def _error(failure: AgreementFailure, kind: str | None = None) -> RanksError:
    if failure.lost:
        return StoreLost(failure.lost)
    during = {STOP: "stopping together", SAVE: "saving together"}.get(kind or "")
    reason = "did not answer: it has died, or stands still"
    if len(failure.missing) == 1:
        return RankFailed(failure.missing[0], reason, during=during)
    return RankFailed(None, f"ranks {', '.join(map(str, failure.missing))} {reason}", during=during)


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, RanksError) else f"{type(error).__name__}: {error}"


def _encode(value: Any) -> bytes:
    return json.dumps(value).encode()


def _decode(value: bytes | None) -> Any:
    return None if value is None else json.loads(value)
