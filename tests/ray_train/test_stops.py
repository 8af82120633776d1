"""Stops of every kind at every moment: nothing is lost, nothing counts as a failure, the result is exact."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.jobs.ray_job import MOMENTS, TARGETS
from tests.support.pairwise import covering
from tests.support.ray_lab import RayLab

pytestmark = pytest.mark.timeout(600)

APART = 4
"""Steps between two disruptions."""

CASES = covering([TARGETS, MOMENTS, (2, 4), ("should_checkpoint", "run")])
"""Every two choices meet."""


def chain(cases: list[tuple[str, str]]) -> tuple[list[dict[str, Any]], int]:
    """Make one run of several cases, each a target and a moment. Returns its plan and its number of steps."""
    in_order = sorted(cases, key=lambda case: case[1] == "last step")
    anywhere = ("last step", "before the first step")
    plan = [
        {"at": moment, "target": target, "step": 0 if moment in anywhere else APART * number + 2}
        for number, (target, moment) in enumerate(in_order)
    ]
    return plan, APART * len(plan) + 2


def run_chain(lab: RayLab, cases: list[tuple[str, str]], *, workers: int, way: str) -> None:
    plan, steps = chain(cases)
    for entry in plan:
        if entry["target"] == "drain":
            lab.add_node()
    placement = "SPREAD" if any(entry["target"] == "drain" for entry in plan) else "PACK"
    # In its last step, a run may finish before its workers have agreed to stop.
    may_finish = plan[-1]["at"] == "last step"
    drivers = [entry for entry in plan if entry["target"] == "driver"]
    for number in range(len(drivers) + 1):
        ended = lab.run(way=way, steps=steps, workers=workers, plan=plan, every=APART, placement=placement)
        if ended.code == 0:
            break
        assert ended.code == 143, f"driver {number + 1}, starts {lab.starts()}: {ended}"
    assert ended.code == 0, f"starts {lab.starts()}: {ended}"
    lab.assert_nothing_lost(steps, workers)
    assert lab.undone(plan) == [], f"starts {lab.starts()}: {ended}"
    assert len(plan) + 1 - len(lab.starts()) in ((0, 1) if may_finish else (0,)), f"starts {lab.starts()}: {ended}"
    assert lab.failures_counted() == 0


@pytest.mark.parametrize("workers", [2, 4])
@pytest.mark.parametrize("way", ["should_checkpoint", "run"])
def test_a_run_survives_every_stop(lab: RayLab, way: str, workers: int) -> None:
    """{who is stopped} × {when}, chosen pairwise: one run after the other, without a failure to spare."""
    cases = [(target, moment) for target, moment, at_workers, by in CASES if (at_workers, by) == (workers, way)]
    last_steps = [case for case in cases if case[1] == "last step"]
    run_chain(lab, [case for case in cases if case not in last_steps[1:]], workers=workers, way=way)
    for number, case in enumerate(last_steps[1:]):
        run_chain(lab.another(f"last-{number}"), [case], workers=workers, way=way)
