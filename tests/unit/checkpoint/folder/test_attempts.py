"""The record of attempts in a checkpoint folder, which the next start reads on whichever machine it is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from reprieve.checkpoint.folder import attempts
from reprieve.checkpoint.folder.attempts import AttemptRecord
from reprieve.launcher_protocol import LAUNCHER_SOCKET
from reprieve.run_state import RunState
from reprieve.storage.disk import Disk

RECORD = AttemptRecord(
    100.0,
    training=110.0,
    kept_until=150.0,
    ended=160.0,
    cause=RunState.PREEMPTED,
    from_step=0,
    to_step=12,
    saved_step=12,
    run="uid",
    launcher="/tmp/reprieve-a/launcher",
    updated=160.0,
)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / ".reprieve").mkdir()
    return tmp_path


def write(root: Path, *records: AttemptRecord, node: int = 0) -> None:
    attempts.write(Disk(), root, records, node=node)


def test_what_is_written_is_read(root: Path) -> None:
    write(root, RECORD, RECORD)
    assert attempts.read(root) == [RECORD, RECORD]
    assert attempts.read(root, node=1) == []


def test_each_node_has_its_own(root: Path) -> None:
    write(root, RECORD, node=0)
    write(root, RECORD, RECORD, node=1)
    assert [len(attempts.read(root, node=node)) for node in (0, 1, 2)] == [1, 2, 0]


def test_an_attempt_whose_launcher_was_killed_is_lost(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    killed = AttemptRecord(100.0, training=110.0, launcher="/tmp/reprieve-a/launcher", updated=140.0)
    running = AttemptRecord(200.0, launcher="/tmp/reprieve-b/launcher", updated=201.0)
    write(root, killed, running)
    monkeypatch.setenv(LAUNCHER_SOCKET, "/tmp/reprieve-b/launcher")
    lost, current = attempts.read(root)
    assert (lost.ended, lost.cause) == (140.0, RunState.LOST)
    assert (current.ended, current.cause) == (None, RunState.RUNNING)


def test_only_an_attempt_that_was_taken_for_lost_gets_another_end() -> None:
    lost = replace(RECORD, ended=140.0, cause=RunState.LOST, to_step=10)
    failed = replace(RECORD, launched=90.0, cause=RunState.FAILED)
    running = AttemptRecord(200.0, launcher="/tmp/reprieve-b/launcher")
    recorded = [replace(failed, cause=RunState.PREEMPTED), RECORD, replace(running, cause=RunState.LOST)]
    assert attempts.with_recorded_ends([failed, lost, running], recorded) == [failed, RECORD, running]
    assert attempts.with_recorded_ends([lost], [replace(lost, to_step=9)]) == [lost], "no end is recorded"
    assert attempts.with_recorded_ends([lost], [replace(RECORD, launched=1.0)]) == [lost], "another attempt"


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"attempts": 3}', '{"attempts": [3]}', '{"attempts": [{}]}'])
def test_an_unreadable_record_is_logged_and_not_used(
    root: Path, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    (root / ".reprieve/attempts-0.json").write_text(content)
    assert attempts.read(root) == []
    assert "is not readable" in caplog.text


def test_a_newer_version_is_not_used_and_unknown_fields_are_ignored(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = root / ".reprieve/attempts-0.json"
    newer = '{"version": 2, "attempts": [{"launched": 1.0}]}'
    path.write_text(newer)
    assert attempts.read(root) == []
    write(root, RECORD)
    assert path.read_text() == newer, "it stays as it is"
    [record] = caplog.records
    assert "attempts-0.json has version 2, and this Reprieve reads versions up to 1" in record.getMessage()
    path.write_text('{"version": 1, "attempts": [{"launched": 1.0, "ended": 2.0, "colour": "red"}]}')
    assert attempts.read(root) == [AttemptRecord(1.0, ended=2.0)]


def test_it_does_not_grow_without_end(root: Path) -> None:
    write(root, *[RECORD] * 1500)
    assert len(attempts.read(root)) == 1000
