"""What comes from a pod may be anything. The report that is made of it is always sane."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reprieve.kubernetes.crd import schema
from reprieve.kubernetes.jobs.reports import NoReport, Report, from_answer, from_termination_message
from reprieve.kubernetes.jobs.training_progress import TrainingProgress, parse
from reprieve.operator.status.merge import with_report
from reprieve.progress.formats import progress_json
from reprieve.progress.sinks import termination_log
from reprieve.progress.snapshot import Checkpoints, Progress
from reprieve.run_state import RunState
from tests.support.operator_kit import BEGAN, answer, stamp, termination_message


def read(**changes: Any) -> Report:
    return from_answer(json.dumps(answer(**changes)).encode(), "pod", BEGAN)


def test_a_right_answer_has_no_problems() -> None:
    report = read()
    assert report.problems == ()
    written = report.progress.to_json()
    expected = {name: value for name, value in answer().items() if value is not None}
    del expected["checkpointing"], written["checkpointing"]
    assert written == expected


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("step", "150"), ("step", -1), ("step", 2**63), ("step", 1.5), ("step", True), ("step", {}),
        ("loss", 0.5), ("loss", "much"), ("loss", "9" * 200), ("loss", []),
        ("percentComplete", "101.0"), ("percentComplete", "-1"), ("percentComplete", "NaN"),
        ("restarts", 2**31), ("saved", "yes"), ("run", 7), ("lastUpdateTime", "yesterday"),
        ("lastUpdateTime", "2026-11-19T05:00:00"), ("lastUpdateTime", "0001-01-01T00:00:00Z"), ("accuracy", "٤"),
        ("lastUpdateTime", "2999-01-01T00:00:00Z"), ("lastUpdateTime", 5),
    ],
)  # fmt: skip
def test_a_value_that_cannot_be_right_is_left_out_and_named(field: str, value: object) -> None:
    report = read(**{field: value})
    assert field not in report.progress.to_json()
    assert len(report.problems) == 1 and report.problems[0].startswith(field), report.problems
    assert report.progress.total_steps == 300, "the rest counts"


@pytest.mark.parametrize(
    ("field", "value"),
    [("checkpointsCreated", -1), ("latestCheckpoint", 7), ("latestCheckpointTime", "2999-01-01T00:00:00Z"),
     ("availableCheckpoints", {}), ("availableCheckpoints", [{"step": "x"}]), ("availableCheckpoints", [7])],
)  # fmt: skip
def test_a_wrong_value_about_checkpoints(field: str, value: object) -> None:
    report = read(checkpointing={field: value})
    assert field not in report.progress.to_json()["checkpointing"]
    assert len(report.problems) == 1 and report.problems[0].startswith(f"checkpointing.{field}"), report.problems


def test_numbers_that_json_does_not_have() -> None:
    body = json.dumps(answer()).replace('"0.4523"', "NaN").replace("150,", "Infinity,").encode()
    report = from_answer(body, "pod", BEGAN)
    assert {problem.partition(":")[0] for problem in report.problems} >= {"step"}
    assert "step" not in report.progress.to_json()


@pytest.mark.parametrize(
    "body",
    [b"", b"ok", b"[1]", b"{}", b'{"state": "excellent"}', b'{"state": ["training"]}', b"\xff" * 9, b"[" * 10**5],
)
def test_what_is_no_report(body: bytes) -> None:
    with pytest.raises(NoReport):
        from_answer(body, "pod", BEGAN)


@pytest.mark.parametrize("seconds", [10**400, -5, True, 1.5, "soon"])
def test_a_time_left_that_cannot_be_right_is_left_out(seconds: object) -> None:
    text = termination_message(estimatedRemainingSeconds=seconds)
    assert from_termination_message(text, "pod", BEGAN).progress.estimated_time_remaining is None


def test_texts_are_cut_and_cleaned() -> None:
    report = read(reason="line\n\x1b[31mred" + "x" * 5000)
    assert report.progress.reason is not None
    assert len(report.progress.reason) == 1024 and report.progress.reason.startswith("line  [31mred")


def test_lists_are_cut() -> None:
    checkpoints = [{"path": f"/c/checkpoint-{n}", "step": n} for n in range(500)]
    listed = read(checkpointing={"availableCheckpoints": checkpoints}).progress.checkpointing.available_checkpoints
    assert (
        listed is not None
        and len(listed)
        == schema()["trainingProgress"]["properties"]["checkpointing"]["properties"]["availableCheckpoints"]["maxItems"]
    )


def test_a_clock_that_is_ahead_makes_no_data_fresh() -> None:
    """The time of the operator counts where there is news, and only there."""
    ahead = stamp(BEGAN + timedelta(hours=1))
    later = BEGAN + timedelta(seconds=60)
    first = with_report(TrainingProgress(), read(lastUpdateTime=ahead), BEGAN)
    assert first.last_update_time == BEGAN
    same = with_report(first, read(lastUpdateTime=ahead), later)
    assert same.last_update_time == BEGAN
    assert with_report(first, read(step=151, lastUpdateTime=ahead), later).last_update_time == later


def test_a_report_cannot_write_what_is_the_operators_own() -> None:
    forged = {"stale": False, "lastExit": {"pod": "x"}, "startsWithoutProgress": 0, "conditions": [], "pod": "other"}
    after = with_report(TrainingProgress(), read(**forged), BEGAN)
    assert (after.last_exit, after.conditions, after.stale, after.starts_without_progress) == (None, None, None, None)
    assert after.pod == "pod"


_VALUES = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
_CONTENT = st.recursive(_VALUES, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner))


@given(st.dictionaries(st.sampled_from(sorted(answer())), _CONTENT))
def test_whatever_is_answered_the_status_is_valid(changes: dict[str, Any]) -> None:
    content = {**answer(), **changes, "state": "training"}
    report = from_answer(json.dumps(content).encode(), "pod", BEGAN)
    written = with_report(TrainingProgress(), report, BEGAN).to_json()
    again, problems = parse(json.loads(json.dumps(written, allow_nan=False)))
    assert problems == [] and again.to_json() == written


# The termination message


def test_a_termination_message_has_what_the_last_answer_would_have() -> None:
    saved = Checkpoints(latest="/c/checkpoint-7", latest_at=BEGAN.timestamp(), created=2, last_save_s=1.5)
    progress = Progress(
        at=BEGAN.timestamp(), state=RunState.STOPPED, reason="SIGTERM", saved=True, step=7, total_steps=10, epoch=1.5,
        total_epochs=2.0, percent=70.0, eta_s=90.0, loss=0.25, learning_rate=5e-5, accuracy=0.5, validation_loss=0.75,
        train={"loss": 0.25, "lr": 5e-5, "accuracy": 0.5}, evaluation={"eval_loss": 0.75}, restarts=1,
        checkpoints=saved,
    )  # fmt: skip
    text = termination_log.message(progress).decode()
    found = from_termination_message(text, "pod", BEGAN).progress.to_json()
    live = from_answer(progress_json.dumps(progress_json.for_training_progress(progress)), "pod", BEGAN)
    expected = live.progress.to_json()
    del expected["checkpointing"]["availableCheckpoints"]
    assert found == expected


def test_the_launchers_last_line() -> None:
    report = from_termination_message(termination_message(message="stopped"), "pod", BEGAN)
    assert (report.message, report.problems) == ("stopped", ())


def test_metrics_that_are_nonsense() -> None:
    text = termination_message(trainMetrics={"loss": "low", "learning_rate": True}, evalMetrics=[1], currentEpoch="x")
    progress = from_termination_message(text, "pod", BEGAN).progress
    assert (progress.loss, progress.learning_rate, progress.current_epoch, progress.step) == (None, None, None, 150)


@pytest.mark.parametrize("text", ["", "Killed", "{}", '{"state": 1}'])
def test_the_messages_of_other_programs(text: str) -> None:
    with pytest.raises(NoReport):
        from_termination_message(text, "pod", BEGAN)
