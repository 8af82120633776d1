"""The marker of a finished run: it counts for the checkpoint that the run finished with, and for no other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from reprieve import Checkpointer
from reprieve.checkpoint.folder import finished_marker
from reprieve.checkpoint.format.manifest import Manifest, read_manifest

OLD = {"run": "r", "attempt": 1, "step": 3, "asked": {"epochs": 2}}
"""As it was written before it had a version."""


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    (tmp_path / ".reprieve").mkdir()
    return tmp_path / ".reprieve" / "finished.json"


def manifest(**changes: Any) -> Manifest:
    return Manifest(**{"step": 3, "created": "", "run": "r", "attempt": 1, "files": {}, **changes})


def test_a_finished_run_leaves_a_marker_that_its_rerun_reads(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, name="r", state={}) as checkpointer:
        checkpointer.save(3)
        checkpointer.mark_finished(3, {"epochs": 2})
    assert json.loads((tmp_path / ".reprieve/finished.json").read_bytes()) == {"version": 1, **OLD}
    assert finished_marker.read(tmp_path, read_manifest(tmp_path / "checkpoint-3")) == {"epochs": 2}


@pytest.mark.parametrize(
    ("checkpoint", "counts"),
    [
        ({}, True),
        ({"step": 4}, False),
        ({"run": "another"}, False),
        ({"attempt": 2}, False),
    ],
    ids=["its own", "another step", "another run", "a later attempt"],
)
@pytest.mark.parametrize("version", [{}, {"version": 1, "colour": "red"}], ids=["old", "new"])
def test_it_counts_for_one_checkpoint(
    version: dict[str, Any], checkpoint: dict[str, Any], counts: bool, marker: Path, tmp_path: Path
) -> None:
    marker.write_text(json.dumps({**version, **OLD}))
    assert finished_marker.read(tmp_path, manifest(**checkpoint)) == ({"epochs": 2} if counts else None)


@pytest.mark.parametrize("content", [json.dumps({**OLD, "version": 2}), '{"version": 2}', "", "[]", '{"run": "r"}'])
def test_one_that_this_version_cannot_read_is_logged_and_does_not_count(
    content: str, marker: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    marker.write_text(content)
    assert finished_marker.read(tmp_path, manifest()) is None
    assert "finished.json is not readable, so the run counts as not finished" in caplog.text
    assert ("it has version 2, and this Reprieve reads versions up to 1" in caplog.text) == ('"version"' in content)


def test_no_marker_is_nothing_to_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert finished_marker.read(tmp_path, manifest()) is None
    assert caplog.text == ""
