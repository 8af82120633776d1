"""What a report changes in the known progress: a position that is not known is not step 0, and no news is old news."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from tests.support.operator_kit import Story, stamp, termination_message

POSITION = ("step", "percentComplete", "epoch", "currentEpoch", "lastUpdateTime")


def stopped_early(state: str, **changes: Any) -> str:
    """What the launcher leaves behind if the start ends before its ranks have reported anything."""
    unknown: dict[str, Any] = dict.fromkeys(
        ("progressPercentage", "estimatedRemainingSeconds", "totalSteps", "currentEpoch", "totalEpochs", "saved")
    )
    checkpointing = {"latestCheckpoint": None, "checkpointsCreated": None, "latestCheckpointTime": None}
    return termination_message(
        **{**unknown, "state": state, "step": 0, "currentStep": 0, "message": "stopped by SIGTERM", **changes},
        trainMetrics={},
        evalMetrics={},
        checkpointing={**checkpointing, "lastSaveDuration": None},
    )


@pytest.mark.parametrize(("state", "exit_code"), [("stopped", 143), ("failed", 1)])
def test_a_start_that_ends_before_it_has_resumed_leaves_the_position(state: str, exit_code: int) -> None:
    story = Story()
    story.train_to(150)
    story.end(143, termination_message(lastUpdateTime=stamp(story.now)))
    story.reconcile()
    before = story.progress
    story.remove_pods()
    story.add_pods()
    story.starts(0)
    story.after(20)
    story.end(exit_code, stopped_early(state, lastUpdateTime=stamp(story.now)))
    story.reconcile()
    assert {name: story.progress[name] for name in POSITION} == {name: before[name] for name in POSITION}
    assert story.progress["lastExit"]["exitCode"] == exit_code
    assert story.reasons[1:] == (["Preempted"] if exit_code == 143 else [])
    if exit_code == 143:
        assert story.events[1].message == "stopped before it trained a new step: checkpoint-150 is the newest"


def test_a_first_start_that_trains_nothing_is_at_step_0() -> None:
    story = Story()
    story.add_pods()
    story.starts(0)
    story.end(143, stopped_early("stopped"))
    story.reconcile()
    assert story.progress["step"] == 0
    assert story.events[0].message == "stopped before it reported a step"


@pytest.mark.parametrize("wrong", [{"epoch": -1}, {"step": "many"}, {"epoch": None, "step": None}])
def test_a_report_whose_time_cannot_be_right_is_news_only_if_it_says_something_new(wrong: dict[str, Any]) -> None:
    story = Story()
    story.train_to(150)
    updated = story.progress["lastUpdateTime"]
    for _ in range(4):
        story.after(30)
        story.reports(**wrong, lastUpdateTime=stamp(story.now + timedelta(days=1)))
        story.reconcile()
    assert (story.progress["lastUpdateTime"], story.progress["stale"]) == (updated, True)
    story.after(30)
    assert story.reconcile().progress is None
    story.reports(step=151, epoch=wrong.get("epoch"), lastUpdateTime=stamp(story.now + timedelta(days=1)))
    story.reconcile()
    assert (story.progress["lastUpdateTime"], story.progress["step"]) == (stamp(story.now), 151)
