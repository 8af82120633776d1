"""The protocol of the common step, through every interleaving of two to four ranks (support/step_protocol_model.py)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from reprieve.ranks import step_protocol as protocol
from tests.support.step_protocol_model import FAILED, FINISHED, STOPPED, Broken, Job

STOP, SAVE = ("stop", None), ("save", None)
"""Requests to any rank. If all ranks are alike, requests to one of them are enough."""
STOP_0, SAVE_0, SAVE_1 = ("stop", 0), ("save", 0), ("save", 1)

JOBS = {
    "a stop": Job(2, steps=3),
    "a boundary before the first step": Job(2, asks_first=True),
    "two stops": Job(2, requests=(STOP, STOP), closes=False),
    "a stop and a save": Job(2, requests=(STOP, SAVE), closes=False),
    "a stop and a save, and ranks that leave": Job(2, steps=1, requests=(STOP_0, SAVE_1), coarse=True),
    "two saves": Job(2, requests=(SAVE_0, SAVE_1), closes=False),
    "does not ask again after a save": Job(2, requests=(STOP_0, SAVE_1), closes=False, asks_again=False),
    "a death": Job(2, deaths=1),
    "a death, a stop and a save": Job(2, steps=1, requests=(STOP_0, SAVE_1), deaths=1, closes=False, coarse=True),
    "time runs out": Job(2, hasty=True),
    "ranks that join late": Job(2, late=True),
    "ranks that join late, and a death": Job(2, late=True, deaths=1),
    "watchers that outlive their rank's leave": Job(2, watcher_stays=True),
    "three ranks": Job(3, steps=3, closes=False),
    "three ranks that leave": Job(3, steps=1, requests=(STOP_0,), coarse=True),
    "three ranks and a death": Job(3, requests=(STOP_0,), deaths=1, closes=False, coarse=True),
    "three ranks and two deaths": Job(3, steps=1, requests=(STOP_0,), deaths=2, closes=False, coarse=True),
    "three ranks, time runs out": Job(3, steps=1, requests=(STOP_0,), hasty=True, closes=False, coarse=True),
    "three ranks that join late": Job(3, requests=(STOP_0,), late=True, closes=False, coarse=True),
    "three ranks, a stop and a save": Job(3, requests=(STOP_0, SAVE_1), closes=False, coarse=True),
    "four ranks": Job(4, requests=(STOP_0,), closes=False),
}
STATES = {"a stop": 3000, "three ranks that leave": 50_000, "three ranks, a stop and a save": 80_000}
"""The least number of states: a model in which little can happen proves little."""

SOAKED = {
    "a stop and a save": Job(2, steps=3, requests=(STOP, SAVE)),
    "two saves and a stop": Job(2, requests=(SAVE, SAVE, STOP), closes=False),
    "a death, a stop and a save": Job(2, requests=(STOP, SAVE), deaths=1),
    "ranks that join late, a stop and a save": Job(2, requests=(STOP, SAVE), late=True),
    "three ranks that leave": Job(3, requests=(STOP,), coarse=True),
    "three ranks that leave, and a death": Job(3, steps=1, requests=(STOP_0,), deaths=1, coarse=True),
    "three ranks that leave, a stop and a save": Job(3, steps=1, requests=(STOP_0, SAVE_1), coarse=True),
    "three ranks, a death, a stop and a save": Job(3, requests=(STOP_0, SAVE_1), deaths=1, closes=False, coarse=True),
}


@pytest.mark.parametrize("name", JOBS)
def test_every_interleaving_ends_well(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    job = JOBS[name]
    states = job.explore()
    with capsys.disabled():
        print(f"\n{name}: {states} states")
    assert states >= STATES.get(name, 1000)
    for kind, _ in job.requests:
        assert any(kind in end for end in job.ends), f"no interleaving serves the {kind}"
    assert any(FINISHED in end for end in job.ends)
    assert any(FAILED in end for end in job.ends) == bool(job.deaths or job.hasty)


@pytest.mark.soak
@pytest.mark.parametrize("name", SOAKED)
def test_every_interleaving_of_more(name: str, soak: None) -> None:
    print(f"\n{name}: {SOAKED[name].explore()} states")


# The same search finds errors in the protocol


def _leaves_without_a_look(rank: int, generation: int, started: int) -> protocol.Program:
    yield protocol.Add("leavers", 1)
    yield protocol.Set(f"left/{rank}", started)


def _counts_nobody_who_left(rank: int, world_size: int, generation: int, started: int) -> protocol.Program:
    yield protocol.Set(f"{generation}/started/{rank}", started)
    return (yield protocol.Add(f"{generation}/arrived", 1)) == world_size


def _waits_for_nobody_late(generation: int) -> protocol.Program:
    yield protocol.Collect(generation)
    return (0, 1)


def _each_as_it_thinks(generation: int, without: tuple[int, ...] = ()) -> protocol.Program:
    """There is no single decision: a rank whose time runs out gives up the others, whatever they decide."""
    answers = yield protocol.Collect(generation)
    missing = [rank for rank, answer in enumerate(answers) if isinstance(answer, protocol.Silent)]
    if not missing:
        return (yield protocol.PutOnce(f"{generation}/end", max(answers)))
    return missing if without else None


@pytest.mark.parametrize("broken", ["no lock", "own step", "publish before freeze"])
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("reduced", [True, False])
def test_without_it_ranks_part(broken: str, world_size: int, reduced: bool) -> None:
    job = Job(world_size, closes=False, broken=broken, reduced=reduced)
    with pytest.raises(Broken, match=r"deadlock|another has stopped|end differently"):
        job.explore()


@pytest.mark.parametrize(
    ("name", "instead", "job"),
    [
        ("common_step", min, Job(2)),
        ("common_step", lambda started: started[0], Job(2)),
        ("common_step", lambda started: sorted(started)[1], Job(3, closes=False)),
        ("leave", _leaves_without_a_look, Job(2)),
        ("_publish", _counts_nobody_who_left, Job(2)),
        ("_joined_and_silent", _waits_for_nobody_late, Job(2, late=True)),
        ("_decide", _each_as_it_thinks, Job(2, hasty=True)),
    ],
    ids=[
        "min",
        "that of rank 0",
        "median",
        "no look at leaving",
        "no count of leavers",
        "no time for late ones",
        "no single end",
    ],
)
def test_with_this_instead_ranks_part(
    name: str, instead: Callable[..., object], job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, name, instead)
    with pytest.raises(Broken, match=r"deadlock|another has stopped|end differently|not the same"):
        replace(job, ends={}).explore()


@pytest.mark.parametrize("name", ["a stop", "a death", "two stops", "does not ask again after a save", "time runs out"])
def test_the_reduction_misses_nothing(name: str) -> None:
    """Exploring all moves in all states finds more states and the same ends."""
    whole, reduced = (replace(JOBS[name], steps=1, reduced=way, ends={}) for way in (False, True))
    assert whole.explore() > reduced.explore()
    assert whole.ends.keys() == reduced.ends.keys()
    assert any(STOPPED in end for end in whole.ends)
