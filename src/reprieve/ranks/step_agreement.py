"""One common step for all ranks: a request to any rank to stop or to save takes effect on all after the same step.

It sits between a request (a signal, a schedule) and the training loop, and runs the protocol of `step_protocol`. A
watcher thread waits in the store for requests, a talker thread publishes those of this rank, and the training thread
calls `boundary` between two steps. Without a request, that reads memory under a lock, about 1 µs. It sends nothing, and
never uses a collective.
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
from reprieve.ranks import step_protocol as protocol
from reprieve.ranks.failpoints import reached
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
"""How long ranks may take to agree on a stop: half of the 30 s that Kubernetes, and torchrun after the first rank has
ended, allow by default. A watcher answers in milliseconds, or in seconds while something holds the GIL."""

_FOREVER = timedelta(days=3650)


class Request(NamedTuple):
    """What all ranks do after the same step."""

    kind: str
    """`stop` or `save`."""

    step: int
    """The number of completed steps."""


class StepAgreement:
    """The agreement of all ranks on when to stop and save. Every rank makes one, with the same `completed`.

    The training thread calls `boundary` after every step, and starts the next only if that returns None. After it has
    served a request, it calls `boundary` again:

        while request := agreement.boundary(step):
            save(step)
            if request.kind == "stop":
                raise Preempted

    Everything that belongs to a step, including a save, may be done before its boundary: a stop that comes meanwhile
    takes effect there.
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
        """`completed`: how many steps the checkpoint has; the same on every rank.

        `stop_limit`: how long a rank may take to answer a stop request. `ranks.limit`, which is longer than any grace
        period, applies to saves and to ranks that have not joined yet.
        `on_lost`: called once, on a background thread, when the ranks can no longer agree on anything.
        `on_stop`: called on a background thread when any rank requests a stop; not in a world of one.
        """
        self._rank = ranks.rank
        self._world_size = ranks.world_size
        self._limits = {
            Patience.FOREVER: _FOREVER,
            Patience.PROMPT: min(stop_limit, ranks.limit) / 2,  # the protocol waits twice
            Patience.LONG: ranks.limit / 2,
            Patience.LATE: ranks.limit,
        }
        self._on_lost = on_lost
        self._on_stop = on_stop
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        # The first step may start without a boundary; if there is one before it, one more step runs.
        self._position = RankPosition(started=completed + 1)
        self._failure: AgreementFailure | None = None
        self._closing = False
        self._stop_requested_at: float | None = None
        self._save_is_pending = False
        # Not a queue.Queue: a signal handler may call `request` while its thread holds any lock.
        self._requests: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._alone = ranks.world_size == 1
        self._stores: list[Store] = []
        self._threads: list[threading.Thread] = []
        if not self._alone:
            for name, work in (("watcher", self._watch), ("talker", self._pass_on_requests)):
                store = prefixed(ranks.store.client(), "step")
                self._stores.append(store)
                self._threads.append(
                    threading.Thread(target=work, args=(store,), name=f"reprieve common step {name}", daemon=True)
                )
            for thread in self._threads:
                thread.start()

    def request(self, kind: str) -> None:
        """Request that all ranks `stop` or `save` after their next common step.

        May be called from any thread, including a signal handler, at any time; returns at once. A stop takes effect
        once, however often it is requested, and nothing takes effect after it. A save that is still pending here is
        not requested again: a schedule may request one at every step at which it is due.
        """
        if kind not in (STOP, SAVE):
            raise ConfigError(f"a request to the ranks is {STOP!r} or {SAVE!r}, not {kind!r}")
        if kind == SAVE:
            if self._save_is_pending:
                return
            self._save_is_pending = True
        self._requests.put(kind)

    def boundary(self, completed: int) -> Request | None:
        """Return what to do after `completed` steps. None: start the next step. Otherwise all ranks get this request
        after this same step; serve it, then call `boundary` again. Called by the training thread.

        Waits only if there is a request and the common step is not known yet: for milliseconds, or until a rank that
        does not answer is given up. Then it raises, once for each request, `RankFailed` on all ranks, or `StoreLost` if
        the store is gone. No step has been started, and this rank's state is that of `completed`.
        """
        if self._alone:
            if self._requests.empty() and not self._position.pending:
                return None  # the usual case, at every step: no other rank has to know
            self._serve_alone()
        with self._lock:
            self._position, verdict = self._position.boundary(completed)
        if verdict is Verdict.GO:
            return None
        if not isinstance(verdict, PendingRequest):
            verdict = self._hold(completed)
        if isinstance(verdict, PendingRequest):
            if verdict.kind == SAVE:
                self._save_is_pending = False
            if isinstance(verdict.outcome, AgreementFailure):
                raise _error(verdict.outcome, verdict.kind)
            return Request(verdict.kind, completed)
        return None

    @property
    def agreed(self) -> int | None:
        """After which step the ranks will serve the last request; None: unknown, or already served."""
        pending = self._position.pending
        outcome = pending[-1].outcome if pending else None
        return outcome if isinstance(outcome, int) else None

    def finish(self) -> None:
        """Note that this rank runs no more steps. It still answers the others until it is closed."""
        with self._lock:
            self._position = self._position.finish()

    def close(self) -> None:
        """Leave: no rank waits for this one any more. Does not wait for other ranks."""
        with self._changed:
            self._position = self._position.finish()
            was_closing, self._closing = self._closing, True
            self._changed.notify_all()
        if was_closing or not self._threads:
            return
        watcher, talker = self._threads
        self._requests.put(None)
        talker.join()
        self._stores[0].close()  # ends the watcher's wait
        watcher.join()

    def __enter__(self) -> StepAgreement:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    # The training thread

    def _hold(self, completed: int) -> Verdict | PendingRequest:
        # This needs no limit: the watcher has one, and settles the request however it ends.
        with self._changed:
            while True:
                self._position, verdict = self._position.boundary(completed)
                if verdict is not Verdict.HOLD:
                    return verdict
                self._changed.wait()

    def _serve_alone(self) -> None:
        """Settle requests in a world of one: the common step is this one."""
        with self._lock:
            while not self._requests.empty():
                kind = self._requests.get()
                if kind is not None and not self._position.is_over:
                    self._position = self._position.freeze(kind).settle(self._position.started)

    # The background threads. No collectives here: the training thread may be in one, or wait for a dead rank in it.

    def _watch(self, store: Store) -> None:
        try:
            for generation in itertools.count():
                if not self._run(store, protocol.watch(self._rank, self._world_size, generation)):
                    break
        except Exception as error:  # noqa: BLE001 - the training thread must not wait for a dead thread
            self._fail(AgreementFailure(lost=_reason(error)))
        finally:
            store.close()

    def _pass_on_requests(self, store: Store) -> None:
        try:
            store.set(f"joined/{self._rank}", b"1")
        except Exception as error:  # noqa: BLE001 - as above
            self._fail(AgreementFailure(lost=_reason(error)))
        while (kind := self._requests.get()) is not None:
            if kind == STOP and self._stop_requested_at is None:
                self._stop_requested_at = time.monotonic()
            requested = False
            try:
                requested = self._run(store, protocol.request_from_all(kind))
            except Exception as error:  # noqa: BLE001 - as above
                self._fail(AgreementFailure(lost=_reason(error)))
            if not requested and self._failure is not None:
                with self._changed:
                    self._position = self._position.refuse(kind, self._failure)
                    self._changed.notify_all()
        try:
            if self._failure is None:
                with self._lock:
                    position = self._position
                self._run(store, protocol.leave(self._rank, max(position.generation - 1, 0), position.started))
        except Exception as error:  # noqa: BLE001 - no rank can be reached any more
            log.debug("rank %d could not publish that it leaves: %s", self._rank, error)
        finally:
            store.close()

    def _fail(self, failure: AgreementFailure) -> None:
        """Note that there will be no common step. Training continues until one is requested."""
        with self._changed:
            is_first = self._failure is None and not self._closing
            self._failure = self._failure or failure
            self._position = self._position.settle(failure)
            self._changed.notify_all()
        if is_first:
            error = _error(failure)
            log.warning(
                "%s (detected by rank %d). The ranks can no longer stop or save together",
                error,
                self._rank,
                extra=ONE_RANK,
            )
            if self._on_lost is not None:
                try:
                    self._on_lost(error)
                except Exception:  # the caller's error must not end this thread
                    log.exception("on_lost failed")

    def _run(self, store: Store, program: Program) -> Any:
        """Run a program. Returns what it returns."""
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
            case protocol.NextGeneration():
                with self._lock:
                    is_over = self._position.is_over or self._closing or self._failure is not None
                    return None if is_over else self._position.generation
            case protocol.AwaitFreeze(generation):
                with self._changed:
                    self._changed.wait_for(
                        lambda: self._position.generation > generation or self._closing or self._failure is not None
                    )
                    return self._position.kind
        return None

    def _wait(self, store: Store, key: str, patience: Patience) -> bytes | None:
        if patience is not Patience.LONG:
            return store.wait(key, self._limits[patience])
        # The rank that a save waits for may be dead. A stop that is requested here meanwhile shortens the wait.
        began = time.monotonic()
        deadline = began + self._limits[Patience.LONG].total_seconds()
        prompt_s = self._limits[Patience.PROMPT].total_seconds()
        while True:
            if self._stop_requested_at is not None:
                deadline = min(deadline, max(began, self._stop_requested_at) + prompt_s)
            remaining_s = deadline - time.monotonic()
            value = store.wait(key, timedelta(seconds=max(0.0, min(remaining_s, prompt_s / 4))))
            if value is not None or remaining_s <= 0:
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
    reason = "did not answer: it is dead, or hangs"
    if len(failure.missing) == 1:
        return RankFailed(failure.missing[0], reason, during=during)
    return RankFailed(None, f"ranks {', '.join(map(str, failure.missing))} {reason}", during=during)


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, RanksError) else f"{type(error).__name__}: {error}"


def _encode(value: Any) -> bytes:
    return json.dumps(value).encode()


def _decode(value: bytes | None) -> Any:
    return None if value is None else json.loads(value)
