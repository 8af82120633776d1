"""The drill's decisions: what is compared, what is a problem, and which advice follows from it."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

from reprieve.checkpoint.state.fingerprint import fingerprints, parts_of
from reprieve.checkpoint.state.state import State
from reprieve.cli import COMMANDS, execute
from reprieve.launch.drill import _TIMED_OUT, DrillReport, _compare, _judge, _not_started
from reprieve.launch.rank_status import JobStatus, RankStatus
from reprieve.launch.runs.outcome import AttemptResult
from reprieve.launcher_protocol import Stopped
from reprieve.storage.uri import original_path, run_folder


def seen(*ranks: dict[str, str], stopped: bool) -> JobStatus:
    found = JobStatus()
    for number, parts in enumerate(ranks):
        found.ranks[number] = RankStatus(
            number, stopped=Stopped(step=1, saved=True, fingerprints=parts) if stopped else None
        )
        found.ranks[number].fingerprints = {} if stopped else parts
    return found


SAVED = {"model": "a", "optimizer": "b", "data order": "c"}


@pytest.mark.parametrize(
    ("restored", "problem"),
    [
        ([SAVED, SAVED], None),
        ([{**SAVED, "more": "d"}, SAVED], None),
        ([SAVED | {"model": "x", "optimizer": "x"}, SAVED], "saved: model, optimizer (rank 0)"),
        ([SAVED | {"model": "x"}, SAVED | {"model": "x"}], "saved: model (ranks 0, 1)"),
        ([SAVED | {"model": "x"}, SAVED | {"data order": "x"}], "saved: model (rank 0); data order (rank 1)"),
        ([SAVED, {"model": "a", "optimizer": "b"}], "saved: data order (rank 1)"),
        ([SAVED, {}], "rank 1 did not report its state"),
        ([SAVED], "rank 1 did not report its state"),
    ],
)
def test_what_differs_is_named_with_its_ranks(restored: list[dict[str, str]], problem: str | None) -> None:
    report = DrillReport(30.0, "a test")
    _compare(report, seen(SAVED, SAVED, stopped=True), seen(*restored, stopped=False))
    assert report.compared == list(SAVED)
    if problem is None:
        assert report.equal is True
        assert report.problems == []
    else:
        assert report.equal is (None if "did not report" in problem else False)
        assert [problem in found for found in report.problems] == [True]


def judged(needed_s: float, *problems: str, **more: Any) -> DrillReport:
    report = DrillReport(30.0, "a test", needed_s=needed_s, save_s=needed_s, problems=list(problems), **more)
    _judge(report)
    return report


def test_advice_on_time_only_where_time_is_short() -> None:
    assert judged(10.0).advice == []
    assert judged(10.0, "another problem").advice == []
    assert judged(10.0).survives
    thin, late = judged(25.0), judged(40.0)
    assert thin.survives
    assert not late.survives
    for report in (thin, late):
        assert "faster disk" in report.advice[0]
        assert "grace period" in report.advice[1]


def test_advice_on_what_differs() -> None:
    [advice] = judged(1.0, "a problem", differences={"data order": [0]}).advice
    assert "fixed seed" in advice


@pytest.mark.parametrize(
    ("code", "stop", "words"),
    [
        (1, None, "ended with exit code 1 before it trained"),
        (-9, _TIMED_OUT, "has not begun to train in time"),
        (0, None, "nothing in this job is protected"),
    ],
)
def test_why_a_job_did_not_come_to_its_training(code: int, stop: str | None, words: str) -> None:
    assert words in str(_not_started(JobStatus(), AttemptResult(code=code, status=JobStatus(), stop=stop)))


def test_a_folder_in_a_drill_and_back(tmp_path: Path) -> None:
    drill = str(tmp_path / "scratch")
    folder = run_folder("/job/out", drill)
    assert folder == tmp_path / "scratch" / "job" / "out"
    assert run_folder(folder, drill) == folder, "a folder in the scratch folder stays there"
    assert original_path(folder, drill) == original_path("/job/out", drill) == Path("/job/out")
    assert run_folder("/job/out", None) == original_path("/job/out", None) == Path("/job/out")


def test_equal_values_have_equal_fingerprints_whatever_holds_them() -> None:
    class Bare:
        pass

    state = {"betas": (0.9, 0.999), "names": {"a", "b", "c"}, "object": Bare(), "weight": torch.ones(2)}
    same = OrderedDict(
        betas=[0.9, 0.999], weight=torch.nn.Parameter(torch.ones(2)), names={"c", "b", "a"}, object=Bare()
    )
    assert fingerprints({"x": state}) == fingerprints({"x": same})
    for other in (
        {**state, "betas": (0.9, 0.99)},
        {**state, "weight": torch.ones(1, 2)},
        {**state, "weight": torch.zeros(2)},
    ):
        assert fingerprints({"x": state}) != fingerprints({"x": other})


def test_parts_have_the_names_that_the_user_gave() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    state = State({"net": model, "opt": torch.optim.SGD(model.parameters())})
    assert set(parts_of(state, 0)) == {"net", "opt", "random numbers"}
    assert set(parts_of(state, 0, rng=False)) == {"net", "opt"}
    assert "1.running_mean" in parts_of(state, 1)["net"], "each rank keeps its own"
    state.own_buffers.clear()  # as under DDP, which overwrites those of other ranks with those of rank 0
    assert "1.running_mean" in parts_of(state, 0)["net"]
    assert "1.running_mean" not in parts_of(state, 1)["net"]


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_a_command_ends_its_first_sentence_once(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        execute([command, "--help"])
    assert "?." not in capsys.readouterr().out
