"""The import hook in every Python process under a launcher: it reports, and disturbs nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
import timeit
import venv
from pathlib import Path
from types import SimpleNamespace

import pytest

from reprieve.adapters.transformers.all_trainers import protect_all
from reprieve.launch.import_hook.finder import HOOK, add_to, install
from reprieve.launch.rank_status import JobStatus
from reprieve.launcher_protocol import LAUNCHER_SOCKET, Listener, Message, Protected, TorchImported

SMALL = """
SEEN_BY_ITSELF = [type(__loader__).__name__, type(__spec__.loader).__name__, __spec__.loader is __loader__]
value = 7
"""
NOTES = """
def called(module):
    loaders = module.__loader__, module.__spec__.loader
    print("called", module.__name__, module.value, *(type(one).__name__ for one in loaders))
"""
INSTALL = "from reprieve.launch.import_hook.finder import install; install({'small': 'notes:called'}); "
CALLED = "called small 7 SourceFileLoader SourceFileLoader"


@pytest.fixture
def env(tmp_path: Path, listener: Listener) -> dict[str, str]:
    """The environment that the launcher creates, with the user's own folder of modules."""
    (tmp_path / "small.py").write_text(SMALL)
    (tmp_path / "notes.py").write_text(NOTES)
    made = {**os.environ, "PYTHONPATH": str(tmp_path), LAUNCHER_SOCKET: str(listener.path)}
    add_to(made)
    return made


def python(code: str, env: dict[str, str], *options: str, executable: str = sys.executable) -> list[str]:
    """Run code and return its output. It must succeed and print nothing to stderr."""
    ended = subprocess.run([executable, *options, "-c", code], env=env, capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stderr) == (0, "")
    return ended.stdout.splitlines()


# The environment


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (None, [str(HOOK)]),
        ("", [str(HOOK)]),
        ("/a:/b", [str(HOOK), "/a", "/b"]),
        (f"/a:{HOOK}:/b", [str(HOOK), "/a", "/b"]),
    ],
)
def test_the_folder_comes_first_and_once(before: str | None, after: list[str]) -> None:
    env = {} if before is None else {"PYTHONPATH": before}
    add_to(env)
    add_to(env)
    assert env == {"PYTHONPATH": os.pathsep.join(after)}


def test_the_hook_is_in_every_process_and_its_folder_is_not_on_the_path(env: dict[str, str]) -> None:
    found = python("import sys; print(type(sys.meta_path[0]).__module__); print(*sys.path, sep='\\n')", env)
    assert found[0] == "reprieve.import_hooks"
    assert str(HOOK) not in found
    again = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import sys; print(sys.meta_path[0])'])"
    assert "reprieve.import_hooks" in python(again, env)[0], "also where a script starts another"


def test_without_a_launcher_nothing_is_installed(env: dict[str, str]) -> None:
    del env[LAUNCHER_SOCKET]
    assert python("import sys; print('reprieve' in sys.modules)", env) == ["False"]


def test_the_sitecustomize_of_the_user_still_runs_once(env: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys; print('mine'); sys.path.append('/added/by/mine')")
    code = "import sys, sitecustomize; print(sitecustomize.__file__, '/added/by/mine' in sys.path, sys.meta_path[0])"
    first, second = python(code, env)
    assert first == "mine"
    assert second.startswith(f"{tmp_path / 'sitecustomize.py'} True")
    assert "reprieve.import_hooks" in second


def test_a_python_without_reprieve_still_starts(env: dict[str, str], tmp_path: Path) -> None:
    venv.EnvBuilder(symlinks=True, with_pip=False).create(tmp_path / "bare")
    bare = str(tmp_path / "bare" / "bin" / "python")
    code = "import importlib.util, small; print(importlib.util.find_spec('reprieve'), small.value)"
    assert python(code, env, executable=bare) == ["None 7"]


@pytest.mark.parametrize("option", ["-S", "-I", "-E"])
def test_a_python_that_leaves_the_hook_out_still_starts(option: str, env: dict[str, str]) -> None:
    assert python("import sys; print('reprieve.launch.import_hook.finder' in sys.modules)", env, option) == ["False"]


def test_trainers_are_protected_whatever_is_imported_first(env: dict[str, str]) -> None:
    """A script that imports `reprieve.transformers` imports transformers through it, in the middle of that import."""
    code = "{}; from transformers import Trainer as T; print(T.train.__code__, T.__init__.__code__)"
    env["REPRIEVE_DRILL"] = "/nowhere"
    for first in ("import reprieve.transformers", "import transformers"):
        [found] = python(code.format(first), env)
        assert "all_trainers.py" in found and "submitted.py" in found, f"{first}: {found}"


# Reports


def test_an_import_of_torch_is_told(env: dict[str, str], listener: Listener) -> None:
    """With the real table. The report is about a process, not about a rank."""
    python("import torch", env)
    reports = listener.read()
    assert [report.message for report in reports] == [TorchImported(undecided=False)]
    status = JobStatus()
    status.update(reports[0])
    assert status.torch
    assert not status.ranks


@pytest.mark.parametrize(
    ("script", "undecided"),
    [
        ("import torch", False),
        ("import torch\ndef f():\n  import reprieve", True),
        ("import torch\nfrom prepared import loop", True),
        ("from trl import x", True),
    ],
)
def test_a_script_that_may_protect_itself_later_is_told(
    env: dict[str, str], listener: Listener, tmp_path: Path, script: str, undecided: bool
) -> None:
    (tmp_path / "trl.py").write_text("import torch; x = 1")
    (tmp_path / "prepared.py").write_text("import os, reprieve; loop = '\\d'")  # Python warns once, and not for us
    (tmp_path / "script.py").write_text(script)
    python("import script", env)
    assert [report.message for report in listener.read()] == [TorchImported(undecided=undecided)]


@pytest.mark.parametrize(
    ("arguments", "reports"),
    [
        (["torchrun", "train.py"], []),
        (["-m", "torch.distributed.run", "train.py"], []),
        (["accelerate", "launch", "train.py"], []),
        (["train.py"], [TorchImported(undecided=False)]),
    ],
    ids=lambda each: each[0] if each and isinstance(each[0], str) else "",
)
def test_what_starts_the_ranks_is_no_script_that_trains(
    env: dict[str, str], listener: Listener, tmp_path: Path, arguments: list[str], reports: list[Message]
) -> None:
    """torchrun imports torch long before a rank does, whose script may prepare its data first."""
    for name in ("torch/__init__.py", "torch/distributed/__init__.py", "torch/distributed/run.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    for name in ("torchrun", "accelerate", "train.py"):
        (tmp_path / name).write_text("import torch")
    subprocess.run([sys.executable, *arguments], env=env, cwd=tmp_path, check=True, timeout=60)
    assert [report.message for report in listener.read()] == reports


@pytest.mark.parametrize("code", ["import reprieve; reprieve.Run", "from reprieve import Checkpointer"])
def test_the_loop_api_is_told(env: dict[str, str], listener: Listener, code: str) -> None:
    python(code, env)
    status = JobStatus()
    for report in listener.read():
        status.update(report)
    assert status.protected


def test_a_trainer_is_told_before_it_exists(listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LAUNCHER_SOCKET, str(listener.path))
    monkeypatch.setattr("reprieve.adapters.transformers.all_trainers.signal_watch.install", lambda _: None)
    protect_all(SimpleNamespace(Trainer=type("Trainer", (), {"train": lambda self: None})))  # type: ignore[arg-type]
    assert [report.message for report in listener.read()] == [Protected()]


def test_to_tell_leaves_nothing_open(env: dict[str, str], listener: Listener) -> None:
    python(
        "import sys; from reprieve.launch.import_hook.finder import report_torch; report_torch(sys)",
        env,
        "-W",
        "error::ResourceWarning",
    )
    assert len(listener.read()) == 1


def test_a_launcher_that_is_gone_disturbs_nobody(env: dict[str, str], tmp_path: Path) -> None:
    env[LAUNCHER_SOCKET] = str(tmp_path / "gone")
    assert python(
        "import sys; from reprieve.launch.import_hook.finder import report_torch; report_torch(sys); print(1)", env
    ) == ["1"]


# The table


def test_what_the_table_says_is_done_when_the_module_was_executed(env: dict[str, str]) -> None:
    code = INSTALL + "import small; print(*small.SEEN_BY_ITSELF); print(type(small.__loader__).__name__)"
    assert python(code, env) == [CALLED, "SourceFileLoader SourceFileLoader True", "SourceFileLoader"]


def test_it_is_done_once(env: dict[str, str]) -> None:
    code = INSTALL + "import sys, small, importlib; importlib.reload(small); del sys.modules['small']; import small"
    assert python(code, env) == [CALLED]


def test_a_module_that_is_there_already_is_seen_at_once(env: dict[str, str]) -> None:
    assert python("import small; " + INSTALL, env) == [CALLED]


def test_to_look_whether_a_module_is_there_is_not_to_import_it(env: dict[str, str]) -> None:
    """transformers and accelerate do that with torch before they import it."""
    code = INSTALL + "import importlib.util; print(importlib.util.find_spec('small').name); import small"
    assert python(code, env) == ["small", CALLED]


def test_a_module_that_is_not_there_is_not_found(env: dict[str, str]) -> None:
    code = "from reprieve.launch.import_hook.finder import install; install({'not_there': 'notes:called'})\n"
    code += "try: import not_there\n"
    assert python(code + "except ModuleNotFoundError as error: print(error.name)", env) == ["not_there"]


def test_the_source_and_the_files_of_a_module_can_be_read(env: dict[str, str]) -> None:
    code = INSTALL + "import small, inspect; print('value = 7' in inspect.getsource(small))"
    assert python(code, env) == [CALLED, "True"]


def test_any_other_module_costs_next_to_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    install({"not_there": "notes:called"})
    find_spec = sys.meta_path[0].find_spec
    assert find_spec("json.decoder", None, None) is None
    each = min(timeit.repeat(lambda: find_spec("json.decoder", None, None), number=1000, repeat=20)) / 1000
    assert each < 5e-6
