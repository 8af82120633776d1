"""What the documentation names exists, its links lead somewhere, and its lines are short."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.places import ROOT

PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
LINE_LENGTH = 120


def prose(page: Path) -> str:
    """A page without its code blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_test_that_holds_a_guarantee_exists() -> None:
    """Written as `unit/test_x.py::test_y`, or as `::test_y` for one more of the file before it."""
    missing, seen, file = [], 0, Path()
    text = prose(ROOT / "docs/guarantees.md")
    for name, test in re.findall(r"`((?:\w+/)*test_\w+\.py)?(?:::(\w+))?(?:\[[^`]*\])?`", text):
        seen += 1
        file = ROOT / "tests" / name if name else file
        found = file.is_file() and re.search(rf"^\s*def {test}\b" if test else "", file.read_text(), re.MULTILINE)
        if not found:
            missing.append(f"{file.name}::{test}")
    assert missing == []
    assert seen > 100


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    dead = []
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if link.startswith("http"):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path) if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            dead.append(link)
    assert dead == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_lines_are_short(page: Path) -> None:
    """Except in tables and code: their lines cannot be wrapped."""
    long = [line for line in prose(page).splitlines() if len(line) > LINE_LENGTH and not line.startswith("|")]
    assert long == []
