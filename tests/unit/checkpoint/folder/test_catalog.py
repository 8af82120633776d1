"""How many checkpoints a run has made, although retention removes older ones."""

from __future__ import annotations

from datetime import datetime, timezone
from pathlib import Path

import pytest

from reprieve.checkpoint.folder.catalog import CheckpointInfo, count_created
from reprieve.checkpoint.format.manifest import Manifest
from reprieve.errors import InvalidCheckpoint
from tests.support.helpers import manifest


def found(*numbers: int | None, run: str = "r") -> list[CheckpointInfo]:
    now = datetime.now(timezone.utc)
    return [CheckpointInfo(Path(), 1, manifest(number=number, run=run), None, 1, now) for number in numbers]


@pytest.mark.parametrize(
    ("checkpoints", "created"),
    [
        ([], 0),
        (found(7, 6), 7),
        (found(2, 7), 7),  # a run that was resumed from an older step
        (found(None, None), 2),  # of a version that did not number them
        (found(3, None, None), 3),
        (found(1, None, None), 3),
        (found(9, run="other"), 0),
        ([*found(2), CheckpointInfo(Path(), 5, None, "damaged", 1, datetime.now(timezone.utc))], 2),
    ],
)
def test_how_many_were_made(checkpoints: list[CheckpointInfo], created: int) -> None:
    assert count_created(checkpoints, "r") == created


def test_a_manifest_with_and_without_a_number() -> None:
    for number in (None, 1, 10**6):
        assert Manifest.decode(manifest(number=number).encode()).number == number
    assert b'"number"' not in manifest().encode(), "as older versions wrote it"


@pytest.mark.parametrize("number", [0, -1, 1.5, "1", True])
def test_no_sensible_number(number: object) -> None:
    with pytest.raises(InvalidCheckpoint, match="no sensible number"):
        Manifest.decode(manifest(number=number).encode())
