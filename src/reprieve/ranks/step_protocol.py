"""The protocol by which ranks agree on one common step, without threads, clocks or stores.

`RankPosition` is what a rank knows about its own training thread. `watch`, `request_from_all` and `leave` are the
programs of its background threads: generators that yield one operation at a time and receive its result. So
`step_agreement` runs them on a real store, and the tests run the same code through every interleaving of several ranks.
docs/design/common-step.md explains why the protocol is correct.

Each request has a number, its generation; `put_once` decides which request that is. Keys in the store:

    <generation>/request         what is requested: "stop" or "save"
    <generation>/started/<rank>  how many steps that rank had started when it was frozen
    <generation>/arrived         how many ranks have published that
    <generation>/end             the outcome for all ranks: the step, or the ranks that did not answer
    joined/<rank>                that rank has a watcher
    left/<rank>                  how many steps that rank had started when it left
    leavers                      how many ranks have left
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from enum import Enum
from typing import Any, NamedTuple

STOP = "stop"
SAVE = "save"


# The state of a rank's training thread


class AgreementFailure(NamedTuple):
    """Why there is no common step: ranks did not answer, or the store is lost."""

    missing: tuple[int, ...] = ()
    lost: str = ""


class PendingRequest(NamedTuple):
    """A request for which this rank was frozen, and its outcome: the common step, a failure, or None while unknown."""

    kind: str
    outcome: int | AgreementFailure | None = None


class Verdict(Enum):
    """What the training thread does at a boundary where it serves no request."""

    GO = "start the next step"
    HOLD = "wait until the common step is known"


class RankPosition(NamedTuple):
    """The position of one rank's training thread. Replaced as a whole, and only under the rank's lock."""

    started: int
    """The last step that the training thread may have begun. It never decreases."""

    pending: tuple[PendingRequest, ...] = ()
    """The requests to serve, in order. Only the last may be undecided. Empty: the thread is not frozen."""

    generation: int = 0
    """For how many requests this rank was frozen."""

    kind: str = ""
    """The kind of the last of them."""

    is_over: bool = False
    """There are no more requests: a stop was requested, or the ranks could not agree."""

    is_finished: bool = False
    """The training thread reaches no further boundary."""

    def boundary(self, completed: int) -> tuple[RankPosition, Verdict | PendingRequest]:
        """Decide what the training thread does after `completed` steps: start the next, wait, or serve a request."""
        if self.pending:
            first = self.pending[0]
            if first.outcome is None:
                return self, Verdict.HOLD
            if isinstance(first.outcome, AgreementFailure) or completed >= first.outcome:
                return self._replace(pending=self.pending[1:]), first
            # This also holds while a later request is undecided: its step will not be before this one's.
        started = completed + 1
        if started > self.started:
            return RankPosition(
                started, self.pending, self.generation, self.kind, self.is_over, self.is_finished
            ), Verdict.GO
        return self, Verdict.GO

    def freeze(self, kind: str) -> RankPosition:
        """Freeze for a request: from now on the training thread starts no step that is not agreed on."""
        pending = self.pending if self.is_finished else (*self.pending, PendingRequest(kind))
        return self._replace(
            pending=pending, generation=self.generation + 1, kind=kind, is_over=self.is_over or kind == STOP
        )

    def settle(self, outcome: int | AgreementFailure) -> RankPosition:
        """Note the outcome of the last request."""
        is_over = self.is_over or isinstance(outcome, AgreementFailure)
        if not self.pending or self.pending[-1].outcome is not None:
            return self._replace(is_over=is_over)
        return self._replace(
            pending=(*self.pending[:-1], PendingRequest(self.pending[-1].kind, outcome)), is_over=is_over
        )

    def refuse(self, kind: str, failure: AgreementFailure) -> RankPosition:
        """Note a request that cannot be passed on: the training thread gets the failure at its next boundary."""
        return self._replace(pending=(*self.pending, PendingRequest(kind, failure)), is_over=True)

    def finish(self) -> RankPosition:
        return self._replace(pending=(), is_finished=True)


# The operations of its background threads


class Set(NamedTuple):
    key: str
    value: int


class Add(NamedTuple):
    key: str
    amount: int


class PutOnce(NamedTuple):
    """Set a key if it is not set; the result is the value that it has then."""

    key: str
    value: str | int | Sequence[int]


class Patience(Enum):
    """How long to wait for a key. The result is None if that time passes."""

    FOREVER = "forever"
    PROMPT = "as long as a rank that has joined may take to answer a stop request"
    LONG = "as long as a rank that has joined may take to answer"
    LATE = "as long as a rank may join later than the others"


class Wait(NamedTuple):
    key: str
    patience: Patience


class Silent(Enum):
    """What is known about a rank that has neither answered nor left."""

    ABSENT = "it has not joined yet"
    JOINED = "it should have answered"


class Collect(NamedTuple):
    """Read, for each rank, what it published for this generation, or else its step when it left, or else whether it has
    joined. This is not an atomic snapshot and need not be one: none of these keys ever changes."""

    generation: int


class Forget(NamedTuple):
    """Delete the keys of a generation."""

    generation: int


class Freeze(NamedTuple):
    """Freeze this rank's position, under its lock; the result is `started`."""

    kind: str


class Settle(NamedTuple):
    """Settle this rank's position, under its lock."""

    outcome: int | AgreementFailure


class NextGeneration(NamedTuple):
    """Return the generation of the next request; None if there will be none."""


class AwaitFreeze(NamedTuple):
    """Wait until this rank is frozen for the generation, or never will be; the result is the last freeze's kind."""

    generation: int


Operation = Set | Add | PutOnce | Wait | Collect | Forget | Freeze | Settle | NextGeneration | AwaitFreeze
Program = Generator[Operation, Any, Any]


def watch(rank: int, world_size: int, generation: int) -> Program:
    """Run the watcher of a rank for one generation. Returns whether there may be another.

    It answers at once, whatever the training thread is doing. A rank that is in an all-reduce, in a step of an hour or
    in a save is frozen at its next boundary, and by then the others know which step it is in.
    """
    end = f"{generation}/end"
    kind = yield Wait(f"{generation}/request", Patience.FOREVER)
    started = yield Freeze(kind)
    outcome = None
    if (yield from _publish(rank, world_size, generation, started)):
        outcome = yield from _decide(generation)
    patience = Patience.PROMPT if kind == STOP else Patience.LONG
    if outcome is None:
        outcome = yield Wait(end, patience)
    if outcome is None:
        # A rank that has joined by now and stays silent for the same time again is dead. Late ranks get more time.
        joined = yield from _joined_and_silent(generation)
        outcome = yield Wait(end, patience)
        if outcome is None:
            outcome = yield from _decide(generation, without=joined)
    if outcome is None:
        outcome = yield Wait(end, Patience.LATE)
    if outcome is None:
        outcome = yield from _decide(generation, without=range(world_size))
    agreed = isinstance(outcome, int)
    yield Settle(outcome if agreed else AgreementFailure(missing=tuple(outcome)))
    if agreed and rank == 0 and generation:
        # Every rank has left, or has published for this generation and so has read the end of the one before.
        yield Forget(generation - 1)
    return agreed and kind != STOP


def _publish(rank: int, world_size: int, generation: int, started: int) -> Program:
    """Publish this rank's answer. Returns whether it may be the last: a rank that answers and then leaves is counted
    twice, so `_decide` checks the answers."""
    yield Set(f"{generation}/started/{rank}", started)
    arrived = yield Add(f"{generation}/arrived", 1)
    leavers = yield Add("leavers", 0)
    return arrived + leavers >= world_size


def _joined_and_silent(generation: int) -> Program:
    """Return the ranks that have joined and have not answered."""
    answers = yield Collect(generation)
    return tuple(rank for rank, answer in enumerate(answers) if answer is Silent.JOINED)


def _decide(generation: int, without: Sequence[int] = ()) -> Program:
    """Return the outcome for all ranks, or None while there is a rank to wait for. `without`: ranks to give up.

    There is one outcome, written once: the first rank that knows it writes it, and all others read it.
    """
    answers = yield Collect(generation)
    missing = [rank for rank, answer in enumerate(answers) if isinstance(answer, Silent)]
    if not missing:
        return (yield PutOnce(f"{generation}/end", common_step(answers)))
    given_up = [rank for rank in missing if rank in without]
    if given_up:
        return (yield PutOnce(f"{generation}/end", given_up))
    return None


def common_step(started: Sequence[int]) -> int:
    """Return the first step that no rank is beyond. A rank that is behind can reach it, because all others have started
    the steps that it will run."""
    return max(started)


def request_from_all(kind: str) -> Program:
    """Request something from all ranks. Returns False if no more requests are possible."""
    while True:
        generation = yield NextGeneration()
        if generation is None:
            return False
        yield PutOnce(f"{generation}/request", kind)
        # A request of another kind may have been first: then request again in the next generation. Whether our own
        # request came in time does not matter: this rank has been frozen for the kind since.
        if (yield AwaitFreeze(generation)) == kind:
            return True


def leave(rank: int, generation: int, started: int) -> Program:
    """Leave: no rank waits for this one any more. `generation`: the last for which it was frozen, or 0."""
    # First count, then publish: before `left` is set, no rank can decide without us what we have not answered, and a
    # rank that arrives after it is set counts us.
    yield Add("leavers", 1)
    yield Set(f"left/{rank}", started)
    # A rank that arrived before that may have found us missing, and waits: if no other rank is missing, we decide.
    # (We do not read the request: torch's store wakes all clients that wait for a key when one reads it in vain.)
    while (yield Add(f"{generation}/arrived", 0)):
        outcome = yield from _decide(generation)
        if not isinstance(outcome, int):
            break
        generation += 1
