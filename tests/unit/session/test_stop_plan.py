"""What is saved at a stop, by the time that is left, and what ranks exchange about it."""

from __future__ import annotations

import json

import pytest

from reprieve.preemption.stop_listener import ANOTHER_RANK
from reprieve.session.stop_plan import RankDeadline, StopPlan, common_deadline, plan_last_save


@pytest.mark.parametrize(
    ("running_s", "save_s", "remaining_s", "expected"),
    [
        (3.0, 5.0, 10.0, StopPlan(save=True, save_s=5.0, running_s=3.0)),
        (3.0, 5.0, 7.0, StopPlan(save=True, abort_running=True, save_s=5.0, running_s=0.0)),
        (3.0, 5.0, 4.0, StopPlan(save=False, no_time=True, save_s=5.0, running_s=3.0)),
        (None, 5.0, 7.0, StopPlan(save=True, abort_running=True, save_s=5.0, running_s=0.0)),
        (3.0, 5.0, None, StopPlan(save=True, save_s=5.0, running_s=3.0)),
        (3.0, None, 1.0, StopPlan(save=True, running_s=3.0)),
    ],
    ids=["time for both", "time for one", "time for neither", "just begun", "no deadline", "unknown throughput"],
)
def test_a_running_save_gives_way_to_the_last_one(
    running_s: float | None, save_s: float | None, remaining_s: float | None, expected: StopPlan
) -> None:
    plan = plan_last_save(is_new=True, is_saving=True, running_s=running_s, save_s=save_s, remaining_s=remaining_s)
    assert plan == expected


def test_without_a_running_save_the_step_is_saved_however_short_the_time() -> None:
    plan = plan_last_save(is_new=True, is_saving=False, running_s=0.0, save_s=5.0, remaining_s=1.0)
    assert (plan.save, plan.no_time, plan.needed_s) == (True, False, 5.0)


def test_a_saved_step_is_not_saved_again() -> None:
    plan = plan_last_save(is_new=False, is_saving=True, running_s=3.0, save_s=5.0, remaining_s=1.0)
    assert (plan.save, plan.abort_running, plan.no_time) == (False, False, False)


def test_the_earliest_deadline_counts_with_a_reason_from_outside() -> None:
    ranks = [RankDeadline(None, "SIGTERM", False), RankDeadline(9.0, ANOTHER_RANK, True), RankDeadline(20.0, "x", True)]
    assert common_deadline(ranks) == RankDeadline(9.0, "SIGTERM", True)
    assert common_deadline([RankDeadline(None, ANOTHER_RANK, False)] * 2).reason == ANOTHER_RANK


def test_what_ranks_exchange_survives_json() -> None:
    plan, deadline = StopPlan(save=True, abort_running=True, save_s=1.5), RankDeadline(2.5, "SIGTERM", True)
    assert StopPlan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    assert RankDeadline.from_json(json.loads(json.dumps(deadline.to_json()))) == deadline
