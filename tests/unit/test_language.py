"""The code and the docs use the words of docs/glossary.md, and none of its retired ones."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.places import ROOT

SOURCES = sorted((ROOT / "src").rglob("*.py"))
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")])
RETIRED_WORDS = {
    "asked", "told", "said", "heard", "doomed", "retire", "retiring", "dealt", "dealing", "survey", "errand", "errands",
    "telling", "lending", "followers", "theirs", "ours", "mine", "frm",
}  # fmt: skip
"""As a word of a name: `told_at` and `AskedFor` contain one."""
RETIRED_NAMES = {
    "one", "guard", "ending", "moment", "place", "set_aside", "look_at", "last_words",
    "needs_a_person", "goes_on", "go_on",
}  # fmt: skip
"""As a whole name. In compounds these words have other meanings: `one_shot`, `place_of`."""
ALLOWED_NAMES = {"place"}
"""`place` as a verb."""
RETIRED_PHRASES = (
    r"\b(asked|told|said|heard)\b", r"\bgo(es|ing)? on\b", r"\bwent on\b", r"needs? a person",
    r"set(ting|s)? aside", r"dealt out", r"deal(s|ing)? out", r"last words",
)  # fmt: skip
ALLOWED_PHRASES = ("checkpoint-N.set-aside", ".set-aside", "`asked`", '"asked"')
"""Names on disk stay."""


def words(name: str) -> set[str]:
    return {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)}


def names(path: Path) -> Iterator[tuple[int, str]]:
    """Every name that a file defines: modules, classes, functions, parameters, attributes and variables."""
    yield 0, path.stem
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr


def is_retired(name: str) -> bool:
    return name not in ALLOWED_NAMES and (not words(name).isdisjoint(RETIRED_WORDS) or name.strip("_") in RETIRED_NAMES)


def test_no_name_in_the_code_is_a_retired_word() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line} {name}" for path in SOURCES for line, name in names(path) if is_retired(name)
    ]
    assert found == []


def without_retired_words(page: Path) -> str:
    """A page without the glossary's own table of retired words."""
    return page.read_text().partition("## Retired words")[0]


def retired_phrases(text: str) -> list[str]:
    """The lines of a text that contain a retired phrase, with their numbers."""
    for allowed in ALLOWED_PHRASES:
        text = text.replace(allowed, "")
    return [
        f"{number}: {line.strip()}"
        for number, line in enumerate(text.splitlines(), 1)
        if any(re.search(phrase, line, re.IGNORECASE) for phrase in RETIRED_PHRASES)
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_page_has_a_retired_phrase(page: Path) -> None:
    assert retired_phrases(without_retired_words(page)) == []


def test_no_docstring_comment_or_message_has_a_retired_phrase() -> None:
    found = {str(path.relative_to(ROOT)): retired_phrases(path.read_text()) for path in SOURCES}
    assert {name: lines for name, lines in found.items() if lines} == {}


def test_the_glossary_lists_what_is_retired_here() -> None:
    table = (ROOT / "docs/glossary.md").read_text().partition("## Retired words")[2]
    missing = {
        name for name in RETIRED_WORDS | RETIRED_NAMES if not re.search(rf"\b{name[:5].replace('_', ' ')}", table)
    }
    assert missing == set()
