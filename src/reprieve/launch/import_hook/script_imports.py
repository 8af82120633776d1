"""The packages that a script imports, now or later, read from its source.

    script, modules that are being imported  →  their import statements  →  the script's own modules  →  …

The import hook (finder.py) needs them when torch is imported. There is no other way to see `import reprieve` then: the
hook has imported it before, and `reprieve.Run` is only loaded at its first use, perhaps after an hour of preparing
data, and perhaps in a module that the script imports later. Nothing is imported to find out.
"""

from __future__ import annotations

import ast
import os
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import FrameType

MAX_FILES = 100
"""How many files are read at most. A thousand lines take 7 ms."""
_STANDARD_LIBRARY = Path(os.__file__).parent
_INSTALLED = {"site-packages", "dist-packages"}


def imported_packages(files: Iterable[Path], folders: Sequence[Path]) -> Iterator[str]:
    """Yield the packages that these files import, and those that their modules below `folders` import."""
    pending, read, followed = list(files), set[Path](), set[tuple[Path, str]]()
    while pending and len(read) < MAX_FILES:
        file = pending.pop(0)
        if file in read:
            continue
        read.add(file)
        for level, name in _imports_in(file):
            if level == 0:
                yield name.partition(".")[0]
            elif _is_installed(file):
                continue
            for folder in file.parents[level - 1 : level] if level else folders:
                if (folder, name) not in followed:
                    followed.add((folder, name))
                    pending += _files_of(folder, name)


def running_files() -> list[Path]:
    """Return the file of the script, and those of the modules that are being imported."""
    found = []
    if (script := getattr(sys.modules.get("__main__"), "__file__", None)) is not None:
        found.append(Path(script))
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "<module>":
            found.append(Path(frame.f_code.co_filename))
        frame = frame.f_back
    return found


def own_folders() -> list[Path]:
    """Return the folders that the script imports its own modules from: its folder, and what it or PYTHONPATH added."""
    folders = [Path(entry) for entry in sys.path if isinstance(entry, str)]
    return [folder for folder in folders if not (_is_installed(folder) or folder.is_relative_to(_STANDARD_LIBRARY))]


def _imports_in(file: Path) -> Iterator[tuple[int, str]]:
    """Yield the names in the import statements of a file, wherever they are, each with its level of relative import."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python shows them itself, once, when it runs the file
            tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return  # not there, like that of `python -c`, or not Python of this version
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((0, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = [node.module] if node.module else []
            yield from ((node.level, ".".join([*module, alias.name])) for alias in node.names)


def _files_of(folder: Path, name: str) -> Iterator[Path]:
    """Yield the files that importing `name` from this folder runs: those of its packages, and its own."""
    for part in name.split("."):
        for file in (folder / f"{part}.py", folder / part / "__init__.py"):
            if os.path.isfile(file):  # noqa: PTH113 - it also returns False where a folder cannot be read
                yield file
        folder /= part


def _is_installed(path: Path) -> bool:
    return not _INSTALLED.isdisjoint(path.parts)
