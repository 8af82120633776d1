"""What the documentation names is there."""

from __future__ import annotations

import re
from pathlib import Path

from tests.support.places import ROOT


def test_every_test_that_holds_a_guarantee_exists() -> None:
    """Written as `unit/test_x.py::test_y`, or as `::test_y` for one more of the file before it."""
    missing, seen, file = [], 0, Path()
    text = (ROOT / "docs/guarantees.md").read_text()
    for name, test in re.findall(r"`((?:\w+/)*test_\w+\.py)?(?:::(\w+))?(?:\[[^`]*\])?`", text):
        seen += 1
        file = ROOT / "tests" / name if name else file
        found = file.is_file() and re.search(rf"^\s*def {test}\b" if test else "", file.read_text(), re.MULTILINE)
        if not found:
            missing.append(f"{file.name}::{test}")
    assert missing == []
    assert seen > 100
