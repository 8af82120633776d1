"""Stops of every kind at every moment: nothing is lost, nothing counts as a failure, the result is exact."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.jobs.ray_job import MOMENTS, TARGETS
from tests.support.ray_lab import RayLab, undisturbed_run

pytestmark = pytest.mark.timeout(600)

WAYS = ("should_checkpoint", "run")
APART = 4
"""Steps between two disruptions."""


def chain(cases: list[tuple[str, str]]) -> tuple[list[dict[str, Any]], int]:
    """Make one run of several cases, each a target and a moment. Returns its plan and its number of steps."""
    in_order = sorted(cases, key=lambda case: case[1] == "last step")
    anywhere = ("last step", "before the first step")
    plan = [
        {"at": moment, "target": target, "step": 0 if moment in anywhere else APART * number + 2}
        for number, (target, moment) in enumerate(in_order)
    ]
    return plan, APART * len(plan) + 2


def run_chain(
    lab: RayLab, cases: list[tuple[str, str]], *, workers: int, way: str, protection: str = "RunConfig"
) -> None:
    plan, steps = chain(cases)
    drains = sum(entry["target"] == "drain" for entry in plan)
    resource = lab.room() if drains else None
    for _ in range(workers // 2 - 1 + drains if resource else 0):
        lab.add_node(str(resource), workers=workers // 2)
    options = {"workers": workers, "way": way, "plan": plan, "steps": steps, "protection": protection}
    # In its last step, a run may finish before its workers have agreed to stop.
    may_finish = plan[-1]["at"] == "last step"
    drivers = [entry for entry in plan if entry["target"] == "driver"]
    for number in range(len(drivers) + 1):
        ended = lab.run(every=APART, resource=resource, **options)
        if ended.code == 0:
            break
        assert ended.code == 143, f"driver {number + 1}, starts {lab.starts()}: {ended}"
    assert ended.code == 0, f"starts {lab.starts()}: {ended}"
    lab.assert_nothing_lost(steps, workers)
    assert lab.undone(plan) == [], f"starts {lab.starts()}: {ended}"
    assert len(plan) + 1 - len(lab.starts()) in ((0, 1) if may_finish else (0,)), f"starts {lab.starts()}: {ended}"
    assert lab.failures_counted() == 0
    checkpoint = Path(lab.result()["checkpoint"])
    saved_by_run = lab.folder / "run" / "reprieve" / f"checkpoint-{steps}"
    assert checkpoint == saved_by_run if way == "run" else (checkpoint / "state.pt").exists(), checkpoint
    assert checkpoint.exists()


@pytest.mark.parametrize(
    ("shift", "way", "workers", "protection"),
    [
        (0, "should_checkpoint", 2, "RunConfig"),
        (1, "run", 4, "RunConfig"),
        (2, "run", 2, "protect"),
        (3, "should_checkpoint", 4, "protect"),
        (4, "should_checkpoint", 2, "RunConfig"),
    ],
)
def test_a_run_survives_every_stop(lab: RayLab, shift: int, way: str, workers: int, protection: str) -> None:
    """Everyone who may be stopped, and every moment, one after the other in one run without a failure to spare.

    All runs together have each target at each moment, and each of these two with each way and number of workers."""
    moments = MOMENTS[shift:] + MOMENTS[:shift]
    cases = list(zip(TARGETS, moments, strict=True))
    run_chain(lab, cases, workers=workers, way=way, protection=protection)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("workers", [2, 4])
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("way", WAYS)
def test_the_whole_matrix(soak: None, lab: RayLab, way: str, moment: str, workers: int) -> None:
    if moment != "last step":
        run_chain(lab, [(target, moment) for target in TARGETS], workers=workers, way=way)
        return
    for number, target in enumerate(TARGETS):
        run_chain(lab.another(str(number)), [(target, moment)], workers=workers, way=way)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("way", WAYS)
def test_stops_at_random_moments(soak: None, lab: RayLab, way: str, seed: int) -> None:
    """From 0 to 4 s after the first process of a generation is there: start-up, steps, saves. Nothing hangs."""
    chance = random.Random(seed)
    stops, steps, workers = int(os.environ.get("REPRIEVE_RAY_STOPS", "32")), 4000, 2
    driver = lab.start(way=way, steps=steps, step_s=0.02, every=7, workers=workers)
    seen: set[str] = set()
    for number in range(stops):
        lab.until(lambda: lab.live_workers().keys() - seen, f"generation {number + 1}", during=driver)
        [generation] = lab.live_workers().keys() - seen
        seen.add(generation)
        time.sleep(chance.uniform(0, 4))
        targets = sorted(lab.live_workers()[generation])
        for pid in chance.sample(targets, chance.randint(1, len(targets))):
            os.kill(pid, signal.SIGTERM)
    lab.until(lambda: lab.live_workers().keys() - seen, "the last generation", during=driver)
    os.kill(driver.pid, signal.SIGTERM)
    assert lab.wait(driver).code == 143, lab.output()[-6000:]
    assert [len(lab.starts(rank)) for rank in range(workers)] == [stops + 1] * workers, lab.output()[-6000:]
    done = [lab.steps(rank) for rank in range(workers)]
    assert done == [list(range(len(done[0])))] * workers, "every step once, in order, on all workers"
    assert lab.losses() == undisturbed_run(len(done[0]), workers)[0][0]
    assert lab.failures_counted() == 0
