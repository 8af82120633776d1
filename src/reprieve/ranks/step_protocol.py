"""How ranks find one common step: the protocol alone, without threads, clocks or stores.

`RankPosition` is what a rank knows about its own training thread. `watch`, `ask` and `leave` are what its background
threads do; they yield one operation at a time and are given its result, so that `common_step` runs them on a real
store and the tests run the same code through every interleaving of several ranks. docs/design/common-step.md
says why it is right.

Requests are numbered: there is one of each generation, and `put_once` decides which. Keys in the store:

    <generation>/request         what is asked: "stop" or "save"
    <generation>/started/<rank>  how many steps that rank had started when it was frozen
    <generation>/arrived         how many ranks have published that
    <generation>/end             what all ranks conclude: the step, or who did not answer
    joined/<rank>                that rank has a watcher
    left/<rank>, leavers         how many steps that rank had started when it left, and how many ranks have left
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from enum import Enum
from typing import Any, NamedTuple

STOP = "stop"
SAVE = "save"


# What a rank knows about its training thread


class AgreementFailure(NamedTuple):
    """There is no common step: ranks did not answer, or the store is lost."""

    missing: tuple[int, ...] = ()
    lost: str = ""


class PendingRequest(NamedTuple):
    """A request that this rank has been frozen for, and what came of it as soon as that is known."""

    kind: str
    outcome: int | AgreementFailure | None = None


class Verdict(Enum):
    """What the training thread does at a boundary where it serves nothing."""

    GO = "start the next step"
    HOLD = "wait until the common step is known"


class RankPosition(NamedTuple):
    """Where the training thread of one rank is. Replaced as a whole, and only under the rank's lock."""

    started: int
    """The last step that the training thread may have begun. It never goes back."""

    asked: tuple[PendingRequest, ...] = ()
    """What is to be served, in order. Only the last may be undecided. Empty: the thread is not frozen."""

    generation: int = 0
    """How many requests this rank has been frozen for."""

    kind: str = ""
    """What the last of them asked for."""

    over: bool = False
    """No more requests: a stop was asked for, or the ranks could not agree."""

    finished: bool = False
    """The training thread comes to no boundary any more."""

    def boundary(self, completed: int) -> tuple[RankPosition, Verdict | PendingRequest]:
        """The training thread, after `completed` steps: may it start the next, or what does it do here?"""
        if self.asked:
            first = self.asked[0]
            if first.outcome is None:
                return self, Verdict.HOLD
            if isinstance(first.outcome, AgreementFailure) or completed >= first.outcome:
                return self._replace(asked=self.asked[1:]), first
            # Also while a later request is undecided: its step will not be before this one's.
        started = completed + 1
        if started > self.started:
            return RankPosition(started, self.asked, self.generation, self.kind, self.over, self.finished), Verdict.GO
        return self, Verdict.GO

    def freeze(self, kind: str) -> RankPosition:
        """A request has come: from now on the training thread starts no step that is not agreed on."""
        asked = self.asked if self.finished else (*self.asked, PendingRequest(kind))
        return self._replace(asked=asked, generation=self.generation + 1, kind=kind, over=self.over or kind == STOP)

    def settle(self, outcome: int | AgreementFailure) -> RankPosition:
        """What came of the last request is known."""
        over = self.over or isinstance(outcome, AgreementFailure)
        if not self.asked or self.asked[-1].outcome is not None:
            return self._replace(over=over)
        return self._replace(asked=(*self.asked[:-1], PendingRequest(self.asked[-1].kind, outcome)), over=over)

    def refuse(self, kind: str, failure: AgreementFailure) -> RankPosition:
        """A request that cannot be passed on: the training thread learns it at its next boundary."""
        return self._replace(asked=(*self.asked, PendingRequest(kind, failure)), over=True)

    def finish(self) -> RankPosition:
        return self._replace(asked=(), finished=True)


# What its background threads do, one operation at a time


class Set(NamedTuple):
    key: str
    value: int


class Add(NamedTuple):
    key: str
    amount: int


class PutOnce(NamedTuple):
    """The first one wins; the result is what the key holds."""

    key: str
    value: str | int | Sequence[int]


class Patience(Enum):
    """How long to wait for a key. The result is None when that time has passed."""

    FOREVER = "for ever"
    PROMPT = "as long as a rank that is there may take to answer, when time is short"
    LONG = "as long as a rank that is there may take to answer"
    LATE = "as long as a rank may join later than the others"


class Wait(NamedTuple):
    key: str
    patience: Patience


class Silent(Enum):
    """What is known of a rank that has neither answered nor left."""

    ABSENT = "it has not joined yet"
    JOINED = "it should have answered"


class Collect(NamedTuple):
    """By rank: what it has published for this generation, or else when it left, or else whether it has joined. Not a
    snapshot, and need not be one: none of these keys ever changes."""

    generation: int


class Forget(NamedTuple):
    """Remove the keys of a generation."""

    generation: int


class Freeze(NamedTuple):
    """On this rank's position, under its lock; the result is `started`."""

    kind: str


class Settle(NamedTuple):
    """On this rank's position, under its lock."""

    outcome: int | AgreementFailure


class Current(NamedTuple):
    """The generation that the next request belongs to; None when there will be none."""


class Heard(NamedTuple):
    """Wait until this rank has been frozen for the generation, or will never be; the kind it was last frozen for."""

    generation: int


Operation = Set | Add | PutOnce | Wait | Collect | Forget | Freeze | Settle | Current | Heard
Program = Generator[Operation, Any, Any]


def watch(rank: int, world_size: int, generation: int) -> Program:
    """The watcher of a rank, for one generation. Returns whether there may be another.

    It answers at once, whatever the training thread is doing: a rank that sits in an all-reduce, in a step of an
    hour or in a save is frozen at its next boundary, and the others know by then which step it is in.
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
        # Who is there by now and still silent after the same time again has died. Who joins later has its own time.
        there = yield from _there(generation)
        outcome = yield Wait(end, patience)
        if outcome is None:
            outcome = yield from _decide(generation, without=there)
    if outcome is None:
        outcome = yield Wait(end, Patience.LATE)
    if outcome is None:
        outcome = yield from _decide(generation, without=range(world_size))
    agreed = isinstance(outcome, int)
    yield Settle(outcome if agreed else AgreementFailure(missing=tuple(outcome)))
    if agreed and rank == 0 and generation:
        # Every rank has published for this generation, so it has read the end of the one before; or it has left.
        yield Forget(generation - 1)
    return agreed and kind != STOP


def _publish(rank: int, world_size: int, generation: int, started: int) -> Program:
    """Returns whether this rank was perhaps the last. One that answers and then leaves is counted twice: `_decide`
    looks who is really there."""
    yield Set(f"{generation}/started/{rank}", started)
    arrived = yield Add(f"{generation}/arrived", 1)
    left = yield Add("leavers", 0)
    return arrived + left >= world_size


def _there(generation: int) -> Program:
    """Who has joined and not answered yet."""
    answers = yield Collect(generation)
    return tuple(rank for rank, answer in enumerate(answers) if answer is Silent.JOINED)


def _decide(generation: int, without: Sequence[int] = ()) -> Program:
    """What all ranks conclude, or None as long as there is something to wait for. `without`: whom not to wait for.

    There is one end, written once: whoever knows first writes it, and everybody else takes that.
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
    """The first step that no rank is beyond. Who is behind can get there: all others have started what it will run."""
    return max(started)


def ask(kind: str) -> Program:
    """Ask all ranks for something. Returns whether they were asked; False when nothing will be asked any more."""
    while True:
        generation = yield Current()
        if generation is None:
            return False
        yield PutOnce(f"{generation}/request", kind)
        # Another kind may have been first: then ask again in the next generation. Nobody need look whether our own
        # request was there in time: what counts is that this rank has been frozen for the kind since.
        if (yield Heard(generation)) == kind:
            return True


def leave(rank: int, generation: int, started: int) -> Program:
    """This rank answers no more; nobody need wait for it. `generation`: the last it was frozen for, or 0."""
    # First counted, then told: as long as it is not told, nobody can decide without us what we have not answered,
    # and whoever arrives after it was told counts us.
    yield Add("leavers", 1)
    yield Set(f"left/{rank}", started)
    # Whoever arrived before that may have found us missing, and waits: if nobody else is, it is for us to decide.
    # (Not a look at the request: torch's store wakes everybody who waits for a key when somebody looks at it in vain.)
    while (yield Add(f"{generation}/arrived", 0)):
        outcome = yield from _decide(generation)
        if not isinstance(outcome, int):
            break
        generation += 1
