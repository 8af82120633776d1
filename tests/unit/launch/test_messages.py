"""The launcher's exit message in the termination log, which everybody who can see the pod can read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from reprieve.launch.messages import write_exit_message
from reprieve.run_state import RunState


def test_secrets_are_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "termination-log"
    log.touch()
    monkeypatch.setenv("REPRIEVE_TERMINATION_LOG", str(log))
    monkeypatch.setenv("HF_TOKEN", "0123456789abcdef")
    write_exit_message("CHECKPOINT_URI: s3://me:secret@bucket/0123456789abcdef is no folder", RunState.FAILED)
    assert json.loads(log.read_text())["message"] == "CHECKPOINT_URI: s3://***@bucket/*** is no folder"
