"""The record of attempts in the checkpoint folder, as two launchers use it that overlap."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from reprieve.checkpoint.folder import attempts
from reprieve.checkpoint.folder.attempts import AttemptRecord
from reprieve.launch.runs.attempt_log import AttemptLog
from reprieve.run_state import RunState

OLD = AttemptRecord(100.0, training=110.0, launcher="old")
ENDED = replace(OLD, kept_until=150.0, ended=160.0, cause=RunState.PREEMPTED, to_step=12)
NEW = AttemptRecord(140.0, launcher="new")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / ".reprieve").mkdir()
    return tmp_path


@pytest.fixture
def old(root: Path) -> Iterator[AttemptLog]:
    log = AttemptLog(root, 0, "old")
    yield log
    log.close()


@pytest.fixture
def new(root: Path) -> Iterator[AttemptLog]:
    log = AttemptLog(root, 0, "new")
    yield log
    log.close()


def causes(root: Path) -> list[tuple[str, str]]:
    return [(attempt.launcher, attempt.cause) for attempt in attempts.read(root, launcher="new")]


def wait_until_written(log: AttemptLog) -> None:
    """The thread that writes does one thing after another."""
    log.earlier()


def test_a_predecessor_that_still_saves_is_lost_only_until_it_records_its_end(
    root: Path, old: AttemptLog, new: AttemptLog
) -> None:
    old.update([replace(OLD)])
    wait_until_written(old)
    [lost] = new.earlier()
    assert lost.cause == RunState.LOST
    new.update([lost, replace(NEW)])
    wait_until_written(new)
    assert causes(root) == [("old", "lost"), ("new", "running")]
    old.update([replace(ENDED)])
    wait_until_written(old)
    [ended] = new.earlier()
    assert (ended.cause, ended.ended, ended.to_step) == (RunState.PREEMPTED, 160.0, 12)


def test_the_end_that_a_predecessor_has_recorded_is_not_overwritten(
    root: Path, old: AttemptLog, new: AttemptLog
) -> None:
    old.update([replace(OLD)])
    wait_until_written(old)
    [lost] = new.earlier()
    old.update([replace(ENDED)])
    wait_until_written(old)
    new.update([lost, replace(NEW, training=170.0)])
    wait_until_written(new)
    assert causes(root) == [("old", "preempted"), ("new", "running")]
    assert attempts.read(root)[0].to_step == 12


def test_a_run_that_starts_over_drops_the_attempts_before(root: Path, old: AttemptLog) -> None:
    old.update([replace(ENDED)])
    wait_until_written(old)
    new = AttemptLog(root, 0, "new", starts_over=True)
    assert new.earlier() == []
    new.update([replace(NEW)])
    new.close()
    assert causes(root) == [("new", "running")]
