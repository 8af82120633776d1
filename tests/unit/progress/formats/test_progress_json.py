"""The keys and formats that other programs rely on."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

import pytest

from reprieve.progress.formats import progress_json
from reprieve.progress.snapshot import Checkpoints, ListedCheckpoint, Progress
from tests.support.progress_kit import AT, ODD_NAME, ODD_NUMBERS, progress, strict_json

NOTHING = Progress(at=AT)
NEVER_ODD = ("percent", "eta_s", "epoch", "total_epochs")
EVERYTHING_ODD = {
    entry.name: math.nan for entry in fields(Progress) if entry.type == "float | None" and entry.name not in NEVER_ODD
}


# The file


def test_the_file() -> None:
    assert progress_json.for_file(progress()) == {
        "epoch": 1, "totalEpochs": 3, "step": 150, "totalSteps": 300, "loss": "0.4523", "learningRate": "0.000050",
        "percentComplete": "50.0", "estimatedTimeRemaining": "2m", "lastUpdateTime": "2023-11-14T22:13:20Z",
        "state": "training", "reason": None, "saved": None, "currentEpoch": "1.50", "estimatedRemainingSeconds": 91,
        "accuracy": "0.9000", "validationLoss": "0.5000", "validationAccuracy": "0.8000", "gradientNorm": "1.2500",
        "samplesPerSecond": "32.00", "tokensPerSecond": "65536.00", "resumedFrom": "checkpoint-100",
        "resumedFromStep": 100, "restarts": 2,
        "checkpointing": {
            "enabled": True, "latestCheckpoint": "/workspace/checkpoints/checkpoint-150", "checkpointsCreated": 3,
            "latestCheckpointTime": "2023-11-14T22:08:20Z", "latestCheckpointBytes": 18_500_000_000,
            "checkpointsValid": 2, "savingStep": None, "savingPercentage": None,
        },
    }  # fmt: skip


@pytest.mark.parametrize(
    ("value", "digits", "expected"),
    [
        (0.4523, 4, "0.4523"),
        (2.40584, 4, "2.4058"),
        (12345.6, 4, "12345.6000"),
        (0.0, 4, "0.0000"),
        (-0.25, 4, "-0.2500"),
        (0.000123, 4, "0.00012"),
        (0.000050, 6, "0.000050"),
        (0.000041, 6, "0.000041"),
        (0.001, 6, "0.001000"),
        (1.2e-6, 6, "0.0000012"),
        (9.99e-7, 6, "0.00000100"),
        (3e-9, 6, "0.0000000030"),
        (1e-16, 6, "1e-16"),
        (5e-324, 6, "4.9e-324"),
        (math.nan, 4, "NaN"),
        (math.inf, 4, "Infinity"),
        (-math.inf, 4, "-Infinity"),
        (None, 4, None),
    ],
)
def test_fractions_as_text(value: float | None, digits: int, expected: str | None) -> None:
    assert progress_json.text(value, digits) == expected
    if expected is not None and value:
        assert float(expected) != 0


@pytest.mark.parametrize(
    ("percent", "text", "whole"),
    [
        (0.0, "0.0", 0), (28.32, "28.3", 28), (28.3, "28.3", 28), (100 * 283 / 1000, "28.3", 28), (99.9, "99.9", 99),
        (99.96, "99.9", 99), (99.999999, "99.9", 99), (100.0, "100.0", 100), (None, None, None),
    ],
)  # fmt: skip
def test_percents_are_rounded_down(percent: float | None, text: str | None, whole: int | None) -> None:
    snapshot = progress(percent=percent)
    assert (
        progress_json.for_file(snapshot)["percentComplete"],
        progress_json.for_http(snapshot)["progressPercentage"],
    ) == (
        text,
        whole,
    )


@pytest.mark.parametrize(
    ("state", "eta_s", "expected"),
    [
        ("training", 90.4, 91), ("training", 0.2, 1), ("stopped", 0.0, 1), ("stopped", None, None),
        ("finished", 0.0, 0), ("training", 1e12, 2**31 - 1), ("training", math.inf, None), ("training", math.nan, None),
    ],
)  # fmt: skip
def test_seconds_are_whole_and_zero_only_at_the_end(state: str, eta_s: float | None, expected: int | None) -> None:
    snapshot = progress(state=state, eta_s=eta_s)
    assert progress_json.for_file(snapshot)["estimatedRemainingSeconds"] == expected
    assert progress_json.for_http(snapshot)["estimatedRemainingSeconds"] == expected


@pytest.mark.parametrize(
    ("eta_s", "expected"),
    [
        (0.2, "1s"), (59.0, "59s"), (59.5, "1m"), (61.0, "2m"), (2700.0, "45m"), (3541.0, "1h"), (5400.0, "1h30m"),
        (5401.0, "1h31m"), (180_000.0, "50h"), (None, None), (math.inf, None),
    ],
)  # fmt: skip
def test_the_time_left_as_text_is_rounded_up(eta_s: float | None, expected: str | None) -> None:
    assert progress_json.for_file(progress(eta_s=eta_s))["estimatedTimeRemaining"] == expected


def test_no_time_is_left_only_at_the_end() -> None:
    assert progress_json.for_file(progress(state="finished", eta_s=0.0))["estimatedTimeRemaining"] == "0s"
    assert progress_json.for_file(progress(state="stopped", eta_s=0.0))["estimatedTimeRemaining"] == "1s"


def test_what_is_not_known_is_null() -> None:
    content = progress_json.for_file(NOTHING)
    known = {name for name, value in content.items() if value is not None}
    assert known == {"step", "lastUpdateTime", "state", "checkpointing"}
    assert [name for name, value in content["checkpointing"].items() if value is not None] == ["enabled"]


# /trainingProgress


def test_the_operator_gets_the_file_and_what_is_in_the_folder() -> None:
    listed = (
        ListedCheckpoint(path="/c/checkpoint-150", step=150, created_at=AT, bytes=18_500_000_000, epoch=2.5),
        ListedCheckpoint(path="/c/checkpoint-100.set-aside", step=100, created_at=AT - 60, bytes=7, problem="damaged"),
    )
    now = progress(
        run="job-1", checkpoints=Checkpoints(created=5, valid=1, latest_bytes=7, last_save_s=1.234, listed=listed)
    )
    content, file = progress_json.for_training_progress(now), progress_json.for_file(now)
    assert {name: value for name, value in content.items() if name not in ("run", "checkpointing")} == {
        name: value for name, value in file.items() if name != "checkpointing"
    }
    assert content["run"] == "job-1"
    checkpointing = content["checkpointing"]
    assert checkpointing.items() >= file["checkpointing"].items()
    assert checkpointing["lastSaveDuration"] == "1.23s"
    assert checkpointing["latestCheckpointSize"] == checkpointing["latestCheckpointBytes"] == 7
    assert checkpointing["availableCheckpoints"] == [
        {
            "path": "/c/checkpoint-150", "step": 150, "epoch": 2,
            "created": "2023-11-14T22:13:20Z", "createdAt": "2023-11-14T22:13:20Z",
            "bytes": 18_500_000_000, "size": 18_500_000_000,
            "valid": True, "reason": None,
        },
        {
            "path": "/c/checkpoint-100.set-aside", "step": 100, "epoch": None,
            "created": "2023-11-14T22:12:20Z", "createdAt": "2023-11-14T22:12:20Z", "bytes": 7, "size": 7,
            "valid": False, "reason": "damaged",
        },
    ]  # fmt: skip


def test_what_is_not_known_is_null_for_the_operator_too() -> None:
    content = progress_json.for_training_progress(NOTHING)
    assert content["run"] is None
    assert content["checkpointing"]["lastSaveDuration"] is None
    assert content["checkpointing"]["availableCheckpoints"] == []


def test_a_part_of_an_epoch_is_an_epoch_to_do() -> None:
    assert progress_json.for_file(progress(epoch=2.4, total_epochs=2.5))["totalEpochs"] == 3


def test_a_save_under_way() -> None:
    saves = Checkpoints(saving=160, saving_fraction=0.999)
    content = progress_json.for_file(progress(checkpoints=saves))["checkpointing"]
    assert (content["savingStep"], content["savingPercentage"]) == (160, 99)


# HTTP


def test_what_is_told_over_http() -> None:
    content = progress_json.for_http(progress())
    first = {
        "progressPercentage": 50, "estimatedRemainingSeconds": 91, "currentStep": 150, "totalSteps": 300,
        "currentEpoch": 1.5, "totalEpochs": 3, "trainMetrics": {"loss": 0.45231, "learning_rate": 5e-5},
        "evalMetrics": {"eval_loss": 0.5},
    }  # fmt: skip
    assert list(content)[:8] == list(first)
    assert {name: content[name] for name in first} == first
    assert (content["samplesPerSecond"], content["state"]) == (32.0, "training")
    assert (content["resumedFrom"], content["resumedFromStep"]) == ("checkpoint-100", 100)
    assert content["checkpointing"] == progress_json.for_file(progress())["checkpointing"]


def test_whole_numbers_are_whole() -> None:
    """A Go program decodes them as int and rejects 50.0."""
    content = progress_json.for_http(progress(total_epochs=3.0))
    whole = ("progressPercentage", "estimatedRemainingSeconds", "currentStep", "totalSteps", "totalEpochs")
    assert {type(content[name]) for name in whole} == {int}


# Whatever the numbers and names are


@pytest.mark.parametrize("form", [progress_json.for_file, progress_json.for_http])
def test_odd_numbers_and_names_are_valid_json(form: Any) -> None:
    odd = progress(
        train={**ODD_NUMBERS, ODD_NAME: 1.0}, evaluation=ODD_NUMBERS, reason=ODD_NAME,
        checkpoints=Checkpoints(latest=ODD_NAME), **EVERYTHING_ODD,
    )  # fmt: skip
    content = strict_json(progress_json.dumps(form(odd)))
    assert content["checkpointing"]["latestCheckpoint"] == ODD_NAME
    if form is progress_json.for_http:
        assert content["trainMetrics"] == {
            "nan": None, "inf": None, "minus": None, "tiny": 5e-324, "huge": 1.7e308, "whole": 7, ODD_NAME: 1.0,
        }  # fmt: skip
    else:
        assert content["loss"] == "NaN"


def test_what_is_no_json_is_not_written() -> None:
    with pytest.raises(ValueError, match="JSON"):
        progress_json.dumps({"loss": math.nan})
