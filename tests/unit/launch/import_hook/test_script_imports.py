"""The packages that a script imports, and that its modules will import, without running any of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from reprieve.launch.import_hook import script_imports
from reprieve.launch.import_hook.script_imports import imported_packages


def imported(folder: Path, files: dict[str, str]) -> set[str]:
    """Return what `train.py` imports, with these other files in its folder."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return set(imported_packages([folder / "train.py"], [folder]))


@pytest.mark.parametrize(
    "script",
    [
        "import os, torch, reprieve",
        "import torch as t, reprieve as r",
        "import torch; import reprieve",
        "import reprieve.transformers",
        "from reprieve.transformers import protect",
        "try:\n    import os\nexcept ImportError:\n    pass\nelse:\n    from reprieve import Run",
        "class Loop:\n    def run(self):\n        import torch, \\\n            reprieve",
    ],
)
def test_every_name_of_every_import_statement_counts(script: str, tmp_path: Path) -> None:
    assert "reprieve" in imported(tmp_path, {"train.py": script})


@pytest.mark.parametrize("script", ['"""\nimport reprieve\n"""', "# import reprieve", "imports = 'import reprieve'"])
def test_words_that_are_no_import_do_not_count(script: str, tmp_path: Path) -> None:
    assert imported(tmp_path, {"train.py": script}) == set()


LOOP = "import reprieve"


@pytest.mark.parametrize(
    ("script", "modules"),
    [
        ("import torch, loop", {"loop.py": LOOP}),
        ("from my.loops import train", {"my/loops.py": LOOP}),
        ("from my.loops import train", {"my/loops/__init__.py": "from . import simple", "my/loops/simple.py": LOOP}),
        ("import my.loops.simple", {"my/loops/simple.py": "from ..base import x", "my/base.py": LOOP}),
        ("from my import loops", {"my/loops.py": "from .base import Loop", "my/base.py": LOOP}),
        ("import a", {"a.py": "import b, c", "b.py": "import a, train", "c.py": LOOP}),
        ("import broken, old, loop", {"broken.py": "def (", "old.py": "print 1\0", "loop.py": LOOP}),
    ],
    ids=["beside it", "package", "relative", "parent", "submodule", "circle", "unreadable"],
)
def test_the_modules_of_the_script_are_read_too(script: str, modules: dict[str, str], tmp_path: Path) -> None:
    assert "reprieve" in imported(tmp_path, {"train.py": script, **modules})


def test_other_modules_are_not_read(tmp_path: Path) -> None:
    """Neither those that nothing imports, nor the relative imports of installed ones."""
    library = tmp_path / "site-packages" / "library"
    library.mkdir(parents=True)
    (library / "__init__.py").write_text("import torch\nfrom . import optional")
    (library / "optional.py").write_text("import transformers")
    (tmp_path / "other.py").write_text("import reprieve")
    (tmp_path / "train.py").write_text("import library")
    assert set(imported_packages([tmp_path / "train.py", library / "__init__.py"], [tmp_path])) == {"library", "torch"}


def test_there_is_an_end_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script_imports, "MAX_FILES", 5)
    files = {f"m{number}.py": f"import m{number + 1}" for number in range(9)}
    assert imported(tmp_path, {"train.py": "import m0", **files}) == {"m0", "m1", "m2", "m3", "m4"}


SCRIPT = """
import threading
from reprieve.launch.import_hook.script_imports import imported_packages, own_folders, running_files
def search():
    print("later_package" in imported_packages(running_files(), own_folders()))
thread = threading.Thread(target=search)
thread.start()
thread.join()
if 0:
    import loop, job.loop
"""


@pytest.mark.parametrize("arguments", [["job/train.py"], ["-m", "job.train"], ["tools/start.py"]])
def test_however_the_script_is_started(arguments: list[str], tmp_path: Path) -> None:
    """Also in a thread, where the script is not on the stack."""
    for folder in ("job", "tools"):
        (tmp_path / folder).mkdir()
    (tmp_path / "job" / "train.py").write_text(SCRIPT)
    (tmp_path / "job" / "loop.py").write_text("import later_package")
    (tmp_path / "tools" / "start.py").write_text("from job import train")
    ended = subprocess.run(
        [sys.executable, *arguments],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (ended.stdout, ended.stderr) == ("True\n", "")
