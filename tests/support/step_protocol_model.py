"""A model checker for the protocol of the common step: it drives a small job through every interleaving.

A state is everything that can differ: for each rank the positions of its training thread, its watcher and its talker;
the content of the store; the requests and deaths that are still to come. A move is one atomic event: an operation on
the store, a section under a rank's lock, a step of training, a signal, a death. Steps contain a collective: a rank
completes step k only when all ranks have started it. So a rank that starts a step which another will not run is stuck,
and that is a deadlock.

Two reductions explore fewer states without missing anything. A move that commutes with everything that others can do,
then or later, is explored alone. And nothing after the end of all training threads can harm any of them.

The programs of the background threads are generators, which cannot be copied. The state of a program is the list of
values that it has received; to continue, it is replayed from the beginning.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from reprieve.ranks import step_protocol as protocol
from reprieve.ranks.step_protocol import STOP, AgreementFailure, Patience, RankPosition, Silent, Verdict

T = TypeVar("T")

# What a training thread is doing
AWAY = "not there yet"
IN_STEP = "in a step"
AT_BOUNDARY = "at a boundary"
STOPPED = "stopped"
FINISHED = "finished"
FAILED = "learned that a rank did not answer"
CUT_OFF = "in a collective with a rank that has died or given up"
DEAD = "dead"

RequestTo = tuple[str, int | None]
"""The kind of a request, and the rank that it goes to; None: any."""

Store = frozenset[tuple[str, Any]]


class Broken(AssertionError):
    """A state that must not be reachable, and the path to it."""


class Thread(NamedTuple):
    """A background thread: its program, and the values that this has received so far."""

    program: tuple[Any, ...]
    given: tuple[Any, ...] = ()


class Rank(NamedTuple):
    doing: str
    step: int
    """The step it is in, or the last it completed."""
    position: RankPosition
    watcher: Thread | None
    talker: Thread | None = None
    mail: tuple[str, ...] = ()
    closed: bool = False
    served: tuple[tuple[str, int], ...] = ()
    unlocked_position: RankPosition | None = None
    """Without the lock: the position that the training thread has read and acts on."""


class State(NamedTuple):
    ranks: tuple[Rank, ...]
    store: Store
    requests: tuple[RequestTo, ...]
    deaths: int


class Move(NamedTuple):
    """An event of one rank, with the rank and the store after it."""

    what: tuple[object, ...]
    rank: Rank
    store: Store
    alone: bool = False
    """It commutes with all events of other ranks."""


class Way(NamedTuple):
    what: tuple[object, ...]
    state: State
    following: Iterator[tuple[tuple[object, ...], State]]


@dataclass
class Job:
    """A job to explore, and what can happen to it."""

    world_size: int
    steps: int = 2
    requests: tuple[RequestTo, ...] = ((STOP, None),)
    """Each comes at any time, in any order."""
    deaths: int = 0
    """How many ranks die, at any time."""
    closes: bool = True
    """A rank may close while others still train; otherwise it continues to answer."""
    hasty: bool = False
    """Time may run out at any point, although no rank is dead."""
    late: bool = False
    """Ranks join at any time, not all at the beginning."""
    asks_first: bool = False
    """The training thread calls `boundary` before its first step."""
    asks_again: bool = True
    """After a save the training thread calls `boundary` again before it continues."""
    watcher_stays: bool = False
    """The watcher of a rank that has left keeps running; otherwise it ends at once."""
    coarse: bool = False
    """Publishing and counting, or reading and deciding, is one atomic move."""
    reduced: bool = True
    """Explore moves that commute with everything alone."""
    broken: str = ""
    """A violation of the protocol: `no lock`, `own step`, `publish before freeze`."""
    ends: dict[str, int] = field(default_factory=dict)
    """How the job ended, and in how many states."""

    def __post_init__(self) -> None:
        # No rank reads what is published before all have published.
        self._calm = not (self.deaths or self.hasty or self.late or self.closes or self.broken)
        self._interned: dict[Any, Any] = {}
        self._dicts: dict[int, dict[str, Any]] = {}
        self._programs: dict[Any, tuple[Any, bool, Any, tuple[Any, ...]]] = {}
        self._places: dict[Any, tuple[Any, ...]] = {}
        self._known_moves: dict[Any, list[Move]] = {}

    def explore(self) -> int:
        """Explore every state. Returns their number. Raises `Broken` with the path to the first bad state."""
        start = self._start()
        visited = {self._key(start): True}  # True while it is on the path to the current state
        way = [Way(("start",), start, self._following(start))]
        while way:
            what, state = next(way[-1].following, ((), None))
            if state is None:
                visited[self._key(way.pop().state)] = False
                continue
            key = self._key(state)
            if visited.get(key) is False:
                continue
            way.append(Way(what, state, iter(())))
            try:
                if key in visited:
                    raise Broken("there is a cycle")
                visited[key] = True
                way[-1] = Way(what, state, self._following(state))
            except Broken as broken:
                steps = (" ".join(map(str, what)) for what, _, _ in way)
                raise Broken("\n".join([str(broken), *steps])) from None
        return len(visited)

    def _start(self) -> State:
        rank = Rank(AWAY, 0, RankPosition(started=1), None)
        if not self.late:
            rank = self._joined(rank)
        return State((self.interned(rank),) * self.world_size, self.interned(frozenset()), self.requests, self.deaths)

    def _joined(self, rank: Rank) -> Rank:
        doing, step = (AT_BOUNDARY, 0) if self.asks_first else (IN_STEP, 1)
        return rank._replace(doing=doing, step=step, watcher=Thread(("watch", 0)))

    # What can happen next

    def _following(self, state: State) -> Iterator[tuple[tuple[object, ...], State]]:
        self._check(state)
        if all(rank.doing not in (AWAY, IN_STEP, AT_BOUNDARY) for rank in state.ranks):
            self._check_end(state)
            return iter(())
        following = []
        for number, rank in enumerate(state.ranks):
            if rank.doing == DEAD:
                continue
            for move in (*self._step(state, rank), *self._own_moves(state, number, rank)):
                ranks = (*state.ranks[:number], self.interned(move.rank), *state.ranks[number + 1 :])
                after = State(ranks, move.store, state.requests, state.deaths)
                if move.alone and self.reduced:
                    return iter(((("rank", number, *move.what), after),))
                following.append((("rank", number, *move.what), after))
            following += self._fate(state, number, rank)
        if not following:
            stuck = [f"rank {number} {rank.doing} {rank.step}" for number, rank in enumerate(state.ranks)]
            raise Broken(f"deadlock: {', '.join(stuck)}")
        return iter(following)

    def _fate(self, state: State, number: int, rank: Rank) -> Iterator[tuple[tuple[object, ...], State]]:
        """Yield what comes from outside: requests and deaths."""

        def with_rank(rank: Rank) -> State:
            return state._replace(ranks=(*state.ranks[:number], self.interned(rank), *state.ranks[number + 1 :]))

        if not rank.closed and (rank.talker or not rank.mail):  # otherwise it is the same as a little later
            for kind, whom in dict.fromkeys(state.requests):
                if whom in (None, number):
                    requests = list(state.requests)
                    requests.remove((kind, whom))
                    pending = with_rank(rank._replace(mail=(*rank.mail, kind)))
                    yield ("rank", number, "is requested to", kind), pending._replace(requests=tuple(requests))
        if state.deaths:
            dead = rank._replace(doing=DEAD, watcher=None, talker=None, mail=(), unlocked_position=None)
            yield ("rank", number, "dies"), with_rank(dead)._replace(deaths=state.deaths - 1)

    def _step(self, state: State, rank: Rank) -> Iterator[Move]:
        """Yield the one move that depends directly on other ranks: completing a step."""
        if rank.doing == IN_STEP:
            behind = [other.doing for other in state.ranks if other.step < rank.step]
            if not behind:
                after = rank._replace(doing=AT_BOUNDARY)
                yield Move(("completes step", rank.step), after, state.store, alone=True)
            elif {DEAD, FAILED, CUT_OFF}.intersection(behind):
                yield Move(("is", CUT_OFF), rank._replace(doing=CUT_OFF), state.store)

    def _own_moves(self, state: State, number: int, rank: Rank) -> list[Move]:
        """Return the moves that depend only on this rank and the store. They are cached."""
        died = any(other.doing == DEAD for other in state.ranks)
        key = (number, id(rank), id(state.store), died)
        moves = self._known_moves.get(key)
        if moves is None:
            where = _Where(self, number, rank, state.store, died)
            moves = self._known_moves[key] = [*self._training(where), *where.watcher(), *where.talker()]
        return moves

    def _training(self, where: _Where) -> Iterator[Move]:
        rank, store = where.rank, where.store
        if rank.doing == AWAY:
            yield Move(("joins",), self._joined(rank), where.stored(f"joined/{where.number}", 1))
        elif rank.doing == AT_BOUNDARY and self.broken == "no lock":
            yield from self._unlocked(rank, store)
        elif rank.doing == AT_BOUNDARY:
            yield from self._boundary(rank, store, *rank.position.boundary(rank.step))
        elif rank.doing != IN_STEP and self.closes and not rank.closed:
            yield Move(("closes",), rank._replace(closed=True), store)

    def _unlocked(self, rank: Rank, store: Store) -> Iterator[Move]:
        """Without the lock: first read the position, then act on it, whatever has happened in between."""
        if rank.unlocked_position is None:
            yield Move(("reads its position",), rank._replace(unlocked_position=rank.position), store)
            return
        position, verdict = rank.unlocked_position.boundary(rank.step)
        rank = rank._replace(unlocked_position=None)
        if verdict is Verdict.GO:
            position = rank.position._replace(started=position.started)
        elif verdict is Verdict.HOLD:
            position, verdict = rank.position.boundary(rank.step)
        yield from self._boundary(rank, store, position, verdict)

    def _boundary(self, rank: Rank, store: Store, position: RankPosition, verdict: Any) -> Iterator[Move]:
        rank = rank._replace(position=position)
        if verdict is Verdict.HOLD:
            return
        if verdict is Verdict.GO:
            yield self._next_step(rank, store)
        elif isinstance(verdict.outcome, AgreementFailure):
            rank = rank._replace(doing=FAILED, position=position.finish())
            yield Move(("learns the failure of", verdict.outcome.missing), rank, store)
        else:
            rank = rank._replace(served=(*rank.served, (verdict.kind, rank.step)))
            if verdict.kind == STOP:
                rank = rank._replace(doing=STOPPED, position=position.finish())
                yield Move(("stops after step", rank.step), rank, store)
            elif self.asks_again:
                yield Move(("saves after step", rank.step), rank, store)
            else:
                yield self._next_step(rank, store)

    def _next_step(self, rank: Rank, store: Store) -> Move:
        if rank.step == self.steps:
            return Move(("finishes",), rank._replace(doing=FINISHED, position=rank.position.finish()), store)
        rank = rank._replace(doing=IN_STEP, step=rank.step + 1)
        return Move(("starts step", rank.step), rank, store)

    # Programs

    def program(self, program: tuple[Any, ...], given: tuple[Any, ...]) -> tuple[Any, bool, Any, tuple[Any, ...]]:
        """Return the next operation, whether the program has ended, its result, and the first path to this point."""
        key = (program, given)
        if key not in self._programs:
            self._programs[key] = self._replay(program, given)
        return self._programs[key]

    def _replay(self, program: tuple[Any, ...], given: tuple[Any, ...]) -> tuple[Any, bool, Any, tuple[Any, ...]]:
        name, *arguments = program
        generator: protocol.Program = getattr(protocol, name)(*arguments)
        try:
            operation = next(generator)
            for value in given:
                operation = generator.send(value)
        except StopIteration as end:
            return None, True, end.value, given
        place, inner = [], generator
        while inner is not None:
            place.append((inner.gi_code.co_name, inner.gi_frame.f_lasti, str(inner.gi_frame.f_locals)))
            inner = inner.gi_yieldfrom
        return operation, False, None, self._places.setdefault((program, tuple(place)), given)

    # What must hold

    def _check(self, state: State) -> None:
        """Check that no rank is in a step that a stopped rank will not run, and that all ranks serve the same requests
        after the same steps."""
        stopped = [rank.step for rank in state.ranks if rank.doing == STOPPED]
        if stopped and (furthest := max(rank.step for rank in state.ranks)) > min(stopped):
            raise Broken(f"a rank is in step {furthest}, another has stopped after {min(stopped)}")
        longest = max((rank.served for rank in state.ranks), key=len)
        for rank in state.ranks:
            if rank.served != longest[: len(rank.served)]:
                raise Broken(f"not the same at the same step: {rank.served} and {longest}")

    def _check_end(self, state: State) -> None:
        """Check that all training threads end in the same way, unless a rank is dead or was given up. Even then, no
        rank serves a request that fails on another."""
        ways = sorted({rank.doing for rank in state.ranks})
        served = {rank.served for rank in state.ranks}
        whole = DEAD not in ways and not self.hasty
        differ = whole and (len(ways) > 1 or len(served) > 1 or ways[0] not in (STOPPED, FINISHED))
        if differ or (STOPPED in ways and FAILED in ways):
            raise Broken(f"ranks end differently: {[(rank.doing, rank.served) for rank in state.ranks]}")
        end = " | ".join([*ways, *(kind for kind, _ in max(served, key=len))])
        self.ends[end] = self.ends.get(end, 0) + 1

    # Equal values are one object, so that states compare by the identity of their parts.

    def interned(self, value: T) -> T:
        return self._interned.setdefault(value, value)  # type: ignore[no-any-return]

    def _key(self, state: State) -> tuple[Any, ...]:
        return (*map(id, state.ranks), id(state.store), state.requests, state.deaths)

    def read(self, store: Store) -> dict[str, Any]:
        known = self._dicts.get(id(store))
        if known is None:
            known = self._dicts[id(store)] = dict(store)
        return known


@dataclass(frozen=True)
class _Where:
    """One rank and the store, as the background threads of the rank see them."""

    job: Job
    number: int
    rank: Rank
    store: Store
    died: bool
    """A rank is dead."""

    def watcher(self) -> Iterator[Move]:
        rank = self.rank
        if rank.watcher is None:
            return
        generation = rank.watcher.program[1]
        program = ("watch", self.number, self.job.world_size, generation)
        for move, given, result in self._run(program, rank.watcher.given):
            thread: Thread | None = Thread(rank.watcher.program, given)
            if result is not None:
                thread = Thread(("watch", generation + 1)) if result else None
            yield move._replace(what=("watcher", *move.what), rank=move.rank._replace(watcher=thread))

    def talker(self) -> Iterator[Move]:
        rank = self.rank
        if rank.talker is None:
            if rank.doing == AWAY:
                return
            if rank.closed and f"left/{self.number}" not in self.job.read(self.store):
                frozen_for = max(rank.position.generation - 1, 0)
                talker = Thread(("leave", self.number, frozen_for, rank.position.started))
                rank = rank._replace(talker=talker, mail=())
            elif not rank.closed and rank.mail:
                rank = rank._replace(talker=Thread(("request_from_all", rank.mail[0])), mail=rank.mail[1:])
            else:
                return
        assert rank.talker is not None
        here = _Where(self.job, self.number, rank, self.store, self.died)
        for move, given, result in here._run(rank.talker.program, rank.talker.given):
            after = move.rank._replace(talker=None if result is not None else Thread(rank.talker.program, given))
            if result is not None and rank.closed and not self.job.watcher_stays:
                after = after._replace(watcher=None)
            yield move._replace(what=("talker", *move.what), rank=after)

    def _run(self, program: tuple[Any, ...], given: tuple[Any, ...]) -> Iterator[tuple[Move, tuple[Any, ...], Any]]:
        """Yield the move of the program's next operation, the values that the program has received after it, and its
        result if it ended (True or False)."""
        operation = self.job.program(program, given)[0]
        for move, value in self._operation(operation, given):
            _, done, result, given_now = self.job.program(program, (*given, value))
            if (
                self.job.coarse
                and not done
                and isinstance(operation, protocol.Set | protocol.Collect | protocol.NextGeneration)
            ):
                then = _Where(self.job, self.number, move.rank, move.store, self.died)
                for following, *rest in then._run(program, given_now):
                    yield following._replace(what=(*move.what, "and", *following.what)), *rest
            else:
                yield move, given_now, (bool(result) if done else None)

    def _operation(self, operation: Any, given: tuple[Any, ...]) -> Iterator[tuple[Move, Any]]:
        """Yield the move of an operation and its result; nothing while it has to wait."""
        job, rank, store = self.job, self.rank, self.store
        keys = job.read(store)
        # Keys do not change while a rank has not read them. A rank that has left may find them deleted.
        stable = not rank.closed
        match operation:
            case protocol.Set(key, value):
                after = rank
                generation, _, name = key.partition("/")
                if job.broken == "publish before freeze" and name.startswith("started/"):
                    after = rank._replace(position=rank.position.freeze(keys[f"{generation}/request"]))
                yield Move(("sets", key, value), after, self.stored(key, value), job._calm), None
            case protocol.Add(key, amount):
                total = keys.get(key, 0) + amount
                alone = not amount and not job.closes  # no rank leaves
                yield Move(("adds", amount, key, total), rank, self.stored(key, total), alone), total
            case protocol.PutOnce(key, value):
                held = keys.get(key, tuple(value) if isinstance(value, list) else value)
                # This does not hold for requests: a late one may meet a deleted generation.
                alone = stable and key in keys and key.endswith("/end")
                yield Move(("puts", key, value, "is", held), rank, self.stored(key, held), alone), held
            case protocol.Wait(key, patience):
                if key in keys:
                    yield Move(("waited for", key, keys[key]), rank, store, stable), keys[key]
                elif self._time_can_run_out(key, patience, given):
                    yield Move(("has no more time for", key), rank, store), None
            case protocol.Collect(generation):
                answers = tuple(self._answer(generation, other) for other in range(job.world_size))
                alone = stable and not any(isinstance(answer, Silent) for answer in answers)
                yield Move(("collects", generation, answers), rank, store, alone), answers
            case protocol.Forget(generation):
                kept = frozenset(item for item in store if not item[0].startswith(f"{generation}/"))
                yield Move(("forgets", generation), rank, job.interned(kept)), None
            case protocol.Freeze(kind):
                position = rank.position if job.broken == "publish before freeze" else rank.position.freeze(kind)
                after = rank._replace(position=position)
                yield Move(("freezes to", kind, "at", position.started), after, store), position.started
            case protocol.Settle(outcome):
                if job.broken == "own step" and isinstance(outcome, int):
                    outcome = int(keys[f"{rank.position.generation - 1}/started/{self.number}"])
                after = rank._replace(position=rank.position.settle(outcome))
                yield Move(("knows", outcome), after, store, isinstance(outcome, int)), None
            case protocol.NextGeneration():
                current = None if rank.position.is_over or rank.closed else rank.position.generation
                yield Move(("requests in", current), rank, store), current
            case protocol.AwaitFreeze(generation):
                if rank.position.generation > generation or rank.closed or rank.watcher is None:
                    kind = rank.position.kind
                    yield Move(("is frozen for", kind), rank, store, rank.position.is_over), kind

    def _time_can_run_out(self, key: str, patience: Patience, given: tuple[Any, ...]) -> bool:
        """Whether time can run out. A live rank joins in time and, once it has joined, answers in time."""
        if patience is Patience.FOREVER:
            return False
        if self.job.hasty or self.died:
            return True
        if not self.job.late or patience is Patience.LATE:
            return False
        silent = given[-1] if isinstance(given[-1], tuple) else ()  # as collected half of the time ago
        generation = int(key.partition("/")[0])
        return not any(
            answer is Silent.JOINED and isinstance(self._answer(generation, rank), Silent)
            for rank, answer in enumerate(silent)
        )

    def _answer(self, generation: int, rank: int) -> int | Silent:
        keys = self.job.read(self.store)
        for key in (f"{generation}/started/{rank}", f"left/{rank}"):
            if key in keys:
                return int(keys[key])
        return Silent.JOINED if not self.job.late or f"joined/{rank}" in keys else Silent.ABSENT

    def stored(self, key: str, value: Any) -> Store:
        keys = self.job.read(self.store)
        if keys.get(key, 0) == value:  # a missing counter equals 0
            return self.store
        kept = self.store - {(key, keys[key])} if key in keys else self.store
        return self.job.interned(kept | {(key, value)})
