"""Which of a script's TrainingArguments the submitter of its job replaces."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import TrainingArguments

from reprieve.adapters.transformers.submitted import replace_arguments
from reprieve.submitted_arguments import SubmittedArguments

BEST = {"load_best_model_at_end": True, "metric_for_best_model": "loss"}
STEPS: dict[str, Any] = {"eval_strategy": "steps", "save_strategy": "steps"}


def replaced(submitted: SubmittedArguments, **options: Any) -> Any:
    args = TrainingArguments(output_dir="placeholder", use_cpu=True, report_to="none", **options)
    replace_arguments(submitted, args)
    return args


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({**BEST, **STEPS, "eval_steps": 50, "save_steps": 100}, "save_steps=20 is no multiple of its eval_steps=50"),
        ({**BEST, **STEPS, "eval_steps": 0.1, "save_steps": 0.2}, "save_steps=20 is no multiple of its eval_steps=0.1"),
        ({**BEST, "eval_strategy": "epoch", "save_strategy": "epoch"}, "when it evaluates (eval_strategy=epoch)"),
        ({**BEST, **STEPS, "eval_steps": 50, "save_strategy": "best"}, "the best so far"),
        ({"metric_for_best_model": "loss", **STEPS, "eval_steps": 50, "save_strategy": "best"}, "the best so far"),
    ],
    ids=["no multiple", "shares", "other strategy", "best", "best, not loaded"],
)
def test_a_script_keeps_the_strategy_that_its_best_model_needs(
    options: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    submitted = SubmittedArguments(save_strategy="steps", save_steps=20, save_total_limit=2)
    found = replaced(submitted, **options)
    assert found.save_strategy == options["save_strategy"]
    assert found.save_steps == options.get("save_steps", 500)
    [record] = caplog.records
    assert record.getMessage().startswith("save_strategy=steps is not used: the script ")
    assert reason in record.getMessage()


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({}, 20),
        ({"eval_strategy": "epoch", "save_strategy": "epoch"}, 20),
        ({**BEST, **STEPS, "eval_steps": 50, "save_steps": 50}, 100),
    ],
    ids=["no best model", "evaluations, no best model", "a multiple"],
)
def test_other_strategies_are_replaced(options: dict[str, Any], steps: int, caplog: pytest.LogCaptureFixture) -> None:
    submitted = SubmittedArguments(save_strategy="steps", save_steps=steps, save_total_limit=2)
    found = replaced(submitted, **options)
    assert (found.save_strategy, found.save_steps, found.save_total_limit) == ("steps", steps, 2)
    assert not caplog.records


def test_the_home_of_the_user_is_written_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """TrainingArguments do that when they are made, which is before."""
    monkeypatch.setenv("HOME", "/home/somebody")
    assert replaced(SubmittedArguments(output_dir="~/run")).output_dir == "/home/somebody/run"
