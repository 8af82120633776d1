"""What the ranks of the common-step tests run: small steps with an all-reduce, and somebody who asks at some moment."""

from __future__ import annotations

import random
import signal
import threading
import time
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

from reprieve.errors import RanksError
from reprieve.ranks.failpoints import reached
from reprieve.ranks.group import Ranks
from reprieve.ranks.step_agreement import StepAgreement


class Stop(NamedTuple):
    """One stop, as one rank saw it. Times are of the monotonic clock, which all processes of a machine share."""

    kinds: tuple[str, ...]
    """What was served, in order; a last one `finished` where no stop was."""
    step: int
    asked: float
    """When this rank asked; infinite if it did not."""
    stood: float
    """When it stood at the step."""


class Stops(NamedTuple):
    stops: list[Stop]
    step_s: list[float]


def many_stops(count: int, seed: int, steps: int | None = None) -> Stops:
    """Train and stop, so many times: each with a new common step, at the step where the last one ended.

    With `steps` there are so many each time, and somebody asks from the beginning of the last one on.
    """
    ranks = Ranks.detect()
    plan = random.Random(seed)  # the same on all ranks
    own = random.Random(seed * 1000 + ranks.rank)
    stops: list[Stop] = []
    step_s: list[float] = []
    step = 0
    for number in range(count):
        # One rank, any number of them, or all; a second signal now and then; sometimes somebody wants a save.
        askers = plan.choice(
            [[plan.randrange(ranks.world_size)], [*range(ranks.world_size)], [0, ranks.world_size - 1]]
        )
        # Around the last step, anything from at once to far too late, however fast the machine is just now.
        moments = {rank: plan.uniform(0, 0.03) if steps is None else plan.uniform(0, 0.4) ** 3 for rank in askers}
        saver = plan.randrange(ranks.world_size) if plan.random() < 0.3 else None
        again = plan.random() < 0.3
        with StepAgreement(ranks.scoped(f"stop {number}"), completed=step) as common:
            asker = _Asker(common, moments.get(ranks.rank), again, saves=saver == ranks.rank)
            last = None if steps is None else step + steps
            kinds, step, stood = _train(common, step, last, own, step_s, asker)
            if last is not None:
                common.finish()
                # What comes after the last step has collectives, too: nobody may have stopped where others finished.
                dist.all_reduce(torch.ones(1))
            asker.join()
            stops.append(Stop(kinds, step, asker.asked, stood))
    ranks.close()
    return Stops(stops, step_s)


def _train(
    common: StepAgreement, step: int, last: int | None, own: random.Random, step_s: list[float], asker: _Asker
) -> tuple[tuple[str, ...], int, float]:
    kinds: list[str] = []
    if last is None:
        asker.start()
    while step != last:
        if last == step + 1:
            asker.start()
        begun = time.monotonic()
        time.sleep(_straggle(own))
        dist.all_reduce(torch.ones(1000))
        time.sleep(_straggle(own))
        step += 1
        step_s.append(time.monotonic() - begun)
        while request := common.boundary(step):
            assert request.step == step
            kinds.append(request.kind)
            if request.kind == "stop":
                return tuple(kinds), step, time.monotonic()
    return (*kinds, "finished"), step, time.monotonic()


def _straggle(own: random.Random) -> float:
    """A rank is late before or after the all-reduce, now and then much."""
    return own.uniform(0.0005, 0.0015) if own.random() < 0.95 else own.uniform(0.002, 0.02)


class _Asker:
    """Asks for a stop at some moment, from a thread, as the guard would."""

    def __init__(self, common: StepAgreement, moment_s: float | None, again: bool, saves: bool) -> None:
        self.asked = float("inf")
        self._common = common
        self._again = again
        self._timers = []
        if moment_s is not None:
            self._timers.append(threading.Timer(moment_s, self._ask))
        if saves:
            self._timers.append(threading.Timer(0.01, lambda: common.request("save")))

    def start(self) -> None:
        for timer in self._timers:
            timer.start()

    def _ask(self) -> None:
        self.asked = time.monotonic()
        self._common.request("stop")
        if self._again:
            self._common.request("stop")

    def join(self) -> None:
        for timer in self._timers:
            timer.join()


# One thing at a time, without collectives: they would fail first


def train_and_tell(asker: int, stop_limit_s: float = 2, steps: int = 2000) -> tuple[str, int, float]:
    """What the boundary gave in the end, after which step, how long after somebody could have asked."""
    ranks = Ranks.detect()
    with StepAgreement(ranks, completed=0, stop_limit=timedelta(seconds=stop_limit_s)) as common:
        ranks.agree("all are there")
        begun = time.monotonic()
        for step in range(1, steps + 1):
            time.sleep(0.002)
            reached(f"step {step}")
            if step == 10 and ranks.rank == asker:
                common.request("stop")
            try:
                request = common.boundary(step)
            except RanksError as error:
                return f"{type(error).__name__}: {error}", step, time.monotonic() - begun
            if request:
                return request.kind, step, time.monotonic() - begun
        common.finish()
    return "finished", steps, time.monotonic() - begun


def outlive_the_store(steps: int) -> tuple[int, str]:
    """Rank 0 serves the store, and dies. How many steps went well then, and what a request after that gave."""
    ranks = Ranks.detect()
    common = StepAgreement(ranks, completed=0)
    lost = threading.Event()
    common._on_lost = lambda error: lost.set()
    if ranks.rank == 0:
        for other in range(1, ranks.world_size):
            ranks.receive("there", other)
        reached("all are there")
    else:
        ranks.send("there", 0, b"")
    assert lost.wait(20), "the watcher did not notice"
    for step in range(1, steps + 1):
        assert common.boundary(step) is None
    common.request("stop")
    try:
        for step in range(steps + 1, steps + 10_000):
            time.sleep(0.001)
            assert common.boundary(step) is None
    except RanksError as error:
        return steps, type(error).__name__
    finally:
        common.close()
    return steps, "nothing"


def stop_by_signal() -> tuple[str, int]:
    """SIGTERM, to a rank whose handler asks for a stop."""
    ranks = Ranks.detect()
    common = StepAgreement(ranks, completed=0)
    signal.signal(signal.SIGTERM, lambda *_: common.request("stop"))
    with common:
        for step in range(1, 5000):
            dist.all_reduce(torch.ones(1))
            time.sleep(0.001)
            reached(f"step {step}")
            if request := common.boundary(step):
                return request.kind, request.step
    return "finished", step


def die_without_close() -> str:
    """A script that never closes and just ends: nothing keeps its process."""
    ranks = Ranks.detect()
    common = StepAgreement(ranks, completed=0)
    assert common.boundary(1) is None
    return "ended"
