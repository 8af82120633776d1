"""The tree stays easy to read: small modules, small folders, and no test helper that exists twice."""

from __future__ import annotations

import ast
import statistics
from collections import defaultdict
from pathlib import Path

from tests.support.places import ROOT, SUPPORT

SOURCE = ROOT / "src" / "reprieve"
MODULES = {path: len(path.read_text().splitlines()) for path in SOURCE.rglob("*.py") if path.name != "__init__.py"}


def test_modules_are_small() -> None:
    sizes = sorted(MODULES.values())
    assert statistics.median(sizes) <= 150
    assert sizes[int(len(sizes) * 0.9)] <= 400
    assert {str(path.relative_to(SOURCE)): size for path, size in MODULES.items() if size > 500} == {}


def test_folders_are_small() -> None:
    """`__main__.py` and `_version.py` are there for Python and for packaging."""
    found: dict[Path, list[str]] = defaultdict(list)
    for path in MODULES:
        if not path.name.startswith("_"):
            found[path.parent].append(path.name)
    assert {str(folder.relative_to(ROOT)): len(names) for folder, names in found.items() if len(names) > 15} == {}


def test_no_helper_exists_twice() -> None:
    """A function or class of tests/support/ has one name, and no test module defines it again with the same body."""
    bodies: dict[str, set[str]] = defaultdict(set)
    for path in (ROOT / "tests").rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("test_"):
                text = ast.unparse(ast.Module(body=node.body, type_ignores=[]))
                if text.count("\n") >= 3:
                    bodies[f"{node.name}\n{text}"].add(str(path.relative_to(ROOT)))
    assert {key.partition("\n")[0]: files for key, files in bodies.items() if len(files) > 1} == {}


def test_helpers_in_support_have_names_of_their_own() -> None:
    """What child processes run (jobs/, hf_scripts/) are programs: their names are their own business."""
    places: dict[str, list[str]] = defaultdict(list)
    for path in SUPPORT.glob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(path.name)
    assert {name: files for name, files in places.items() if len(files) > 1} == {}
