"""Files that hold what a function is expected to produce. `REPRIEVE_UPDATE_GOLDEN=1` writes them anew."""

from __future__ import annotations

import os
from pathlib import Path

from tests.support.places import ROOT


def check_golden(path: Path, text: str) -> None:
    """Compare a text with the file that holds what it should be."""
    if os.environ.get("REPRIEVE_UPDATE_GOLDEN") == "1":
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    name = path.relative_to(ROOT)
    assert text == path.read_text(), f"{name} differs. If that is right: REPRIEVE_UPDATE_GOLDEN=1, and look at the diff"
