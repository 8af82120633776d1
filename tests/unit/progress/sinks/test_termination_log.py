"""The termination log: what remains of a terminated container."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from reprieve.launch.messages import print_exit_message
from reprieve.progress.formats import progress_json
from reprieve.progress.sinks import termination_log
from reprieve.progress.sinks.termination_log import MAX_BYTES, TerminationSink
from reprieve.progress.snapshot import Checkpoints
from reprieve.run_state import RunState
from tests.support.progress_kit import ODD_NAME, progress, strict_json


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "termination-log"
    path.touch()
    return path


def test_nothing_is_written_while_it_trains(log: Path) -> None:
    TerminationSink(log).update(progress())
    assert log.read_text() == ""


def test_after_a_stop_it_is_written_before_the_end(log: Path) -> None:
    stopped = progress(state="stopped", reason="SIGTERM", saved=True)
    TerminationSink(log).update(stopped)
    content = strict_json(log.read_text())
    assert (content["state"], content["saved"], content["progressPercentage"]) == ("stopped", True, 50)


def test_it_is_written_in_place(log: Path) -> None:
    """It is mounted into the container: renaming another file over it would not change it."""
    with log.open() as mounted:
        TerminationSink(log).close(progress())
        assert strict_json(mounted.read())["currentStep"] == 150


def test_it_is_not_made(tmp_path: Path) -> None:
    TerminationSink(tmp_path / "none").close(progress(state="finished"))
    assert not (tmp_path / "none").exists()


MANY = {f"metric {number}": float(number) for number in range(500)}
TOO_MUCH = {
    "metrics": {"train": MANY},
    "all metrics": {"train": MANY, "evaluation": MANY},
    "one long name": {"train": {"x" * 10_000: 1.0, "loss": 0.5}},
    "a long reason": {"reason": "🚀" * 5_000},
    "a long path": {"checkpoints": Checkpoints(latest="/ü" * 5_000)},
    "all of it": {
        "train": MANY, "evaluation": MANY, "reason": ODD_NAME * 999, "checkpoints": Checkpoints(latest="x" * 9_999),
    },
}  # fmt: skip


@pytest.mark.parametrize("much", TOO_MUCH.values(), ids=TOO_MUCH.keys())
def test_it_is_never_too_long_and_always_json(log: Path, much: dict[str, Any]) -> None:
    TerminationSink(log).close(progress(state="failed", **much))
    assert 500 < log.stat().st_size <= MAX_BYTES
    content = strict_json(log.read_text())
    assert (content["currentStep"], content["progressPercentage"], content["state"]) == (150, 50, "failed")


def test_what_fits_is_told(log: Path) -> None:
    TerminationSink(log).close(progress(state="finished"))
    content = progress_json.for_http(progress(state="finished"))
    content["checkpointing"]["lastSaveDuration"] = None
    assert strict_json(log.read_text()) == {**content, "step": 150}


def test_the_launcher_leaves_progress_where_it_is(
    log: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("REPRIEVE_TERMINATION_LOG", str(log))
    TerminationSink(log).close(progress(state="stopped", reason="SIGTERM", train=MANY))
    print_exit_message("stopped by SIGTERM: saved at step 150", RunState.PREEMPTED, 150)
    content = strict_json(log.read_text())
    assert (content["message"], content["progressPercentage"]) == ("stopped by SIGTERM: saved at step 150", 50)
    assert log.stat().st_size <= MAX_BYTES
    assert capfd.readouterr().err == "reprieve: stopped by SIGTERM: saved at step 150\n"


@pytest.mark.parametrize("before", ["", "Traceback (most recent call last):", "[1]", '{"a": 1}', "\udcff\udcfe"])
def test_the_launcher_replaces_anything_else(log: Path, before: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REPRIEVE_TERMINATION_LOG", str(log))
    log.write_bytes(before.encode(errors="surrogateescape"))
    print_exit_message("finished after 150 steps", RunState.FINISHED, 150)
    content = strict_json(log.read_text())
    assert (content["message"], content["currentStep"], content["state"]) == (
        "finished after 150 steps",
        150,
        "finished",
    )


@pytest.mark.parametrize(
    ("state", "written"),
    [
        (RunState.PREEMPTED, "stopped"),
        (RunState.PAUSED, "stopped"),
        (RunState.HUNG, "failed"),
        (RunState.FAILED, "failed"),
    ],
)
def test_the_launcher_writes_json_where_no_rank_has(
    log: Path, state: RunState, written: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a node without rank 0, before the training begins, after a kill."""
    monkeypatch.setenv("REPRIEVE_TERMINATION_LOG", str(log))
    print_exit_message("how it ended", state, 7)
    content = strict_json(log.read_text())
    assert (content["message"], content["currentStep"], content["state"]) == ("how it ended", 7, written)
    assert content.keys() == {*progress_json.for_http(progress()), "step", "message"}


def test_a_very_long_last_word_is_cut(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REPRIEVE_TERMINATION_LOG", str(log))
    TerminationSink(log).close(progress(state="failed", reason="y" * 3_000))
    print_exit_message("x" * 9_999, RunState.FAILED)
    assert log.stat().st_size <= MAX_BYTES
    assert strict_json(log.read_text())["message"].startswith("xxx")
    assert termination_log.path() == log
