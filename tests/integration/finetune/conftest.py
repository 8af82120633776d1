"""Tiny models and data, made once for all tests here: one worker runs them (tests/integration/conftest.py)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.finetune_kit import run
from tests.support.jobs.finetune_jobs import make_inputs


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    [result] = run(make_inputs, str(folder))
    assert result.ok, str(result)
    return folder
