"""What the documentation names exists, its links lead somewhere, and its lines are short."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from reprieve.checkpoint.folder.attempts import AttemptRecord
from reprieve.checkpoint.folder.lease import LeaseRecord
from reprieve.kubernetes.pausing import PauseRecord
from reprieve.launch.runs.run_record import RunRecord
from tests.support.places import ROOT

PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")])
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


@pytest.mark.parametrize(
    ("section", "record"),
    [
        ("The lease record", LeaseRecord),
        ("The record of attempts", AttemptRecord),
        ("The run record", RunRecord),
        ("The record of a pause", PauseRecord),
    ],
)
def test_the_format_describes_every_field_of_a_record(section: str, record: type[Any]) -> None:
    text = (ROOT / "docs/format.md").read_text().partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    assert {field.name for field in fields(record) if f"`{field.name}`" not in text} == set()
    assert "| `version` |" in text or "`version` (1)" in text or "has no version" in text


ARCHITECTURE = (ROOT / "docs/architecture.md").read_text()
SOURCE = ROOT / "src/reprieve"


def test_the_architecture_names_every_package() -> None:
    """In a row of its own, as `checkpoint/save`, or in that of its parent, as `save/`."""
    packages = {path.parent.relative_to(SOURCE) for path in SOURCE.rglob("*/__init__.py") if path.parent != SOURCE}
    named = {word.rstrip("/") for word in re.findall(r"`([\w/]+)`", ARCHITECTURE)}
    parents = {parent for package in packages for parent in package.parents}
    missing = {str(each) for each in packages - parents if str(each) not in named and each.name not in named}
    assert missing == set()


def test_every_file_in_the_pictures_of_the_architecture_exists() -> None:
    """Some are named by the end of their path."""
    pictures = "".join(re.findall(r"^```$(.*?)^```$", ARCHITECTURE, re.MULTILINE | re.DOTALL))
    files = set(re.findall(r"(?<![\w/…])[\w/]+\.py\b", pictures))
    tree = [path.as_posix() for path in SOURCE.rglob("*.py")]
    assert {file for file in files if not any(path.endswith(f"/{file.removeprefix('src/')}") for path in tree)} == set()
    assert len(files) > 40


def test_every_thread_is_in_the_table_of_the_architecture() -> None:
    table = ARCHITECTURE.partition("## Threads")[2].partition("\n## ")[0]
    names = {name for path in SOURCE.rglob("*.py") for name in thread_names(path)}
    assert {name for name in names if f"`{name}" not in table} == set()
    assert len(names) > 20


def thread_names(path: Path) -> Iterator[str]:
    """How the names of the threads begin that a module starts."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call):
            continue
        function = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if function in ("ThreadPool", "TimedCaller"):
            name = node.args[-1]
        elif function == "Thread":
            [name] = [keyword.value for keyword in node.keywords if keyword.arg == "name"]
        else:
            continue
        if not isinstance(name, ast.Attribute):  # what a ThreadPool was given
            start = name.values[0] if isinstance(name, ast.JoinedStr) else name
            if isinstance(start, ast.Constant):
                yield f"reprieve {start.value}" if function == "TimedCaller" else str(start.value)
            else:
                assert function == "TimedCaller", ast.unparse(node)
