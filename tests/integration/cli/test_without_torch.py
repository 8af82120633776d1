"""Where torch is not installed: the launcher and the commands about checkpoints work, the rest names the extra."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.places import FIXTURES

CHECKPOINTS = FIXTURES / "checkpoints/loop/checkpoints"
HIDE = """
import sys

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError("No module named 'torch'", name="torch")

sys.meta_path.insert(0, Hidden())
"""


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", HIDE + code], capture_output=True, text=True, timeout=120)


def reprieve(*words: str) -> subprocess.CompletedProcess[str]:
    return python(f"from reprieve.cli import main\nmain({list(words)!r})")


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["--help"], "usage: reprieve COMMAND"),
        (["ls", str(CHECKPOINTS)], "checkpoint-14"),
        (["show", str(CHECKPOINTS / "checkpoint-14")], "model.safetensors"),
        (["verify", str(CHECKPOINTS)], "checkpoint-14: valid"),
        (["run", sys.executable, "-c", "print('trained')"], "trained"),
        (["run", "--explain", "true"], "grace-period"),
    ],
)
def test_commands_that_need_no_torch(
    words: list[str], shown: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REPRIEVE_STATE_DIR", str(tmp_path))
    ended = reprieve(*words)
    assert ended.returncode == 0 and shown in "".join(ended.stdout.split("\n")), ended


def test_status_and_doctor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REPRIEVE_STATE_DIR", str(tmp_path))
    assert reprieve("status", "--json").stdout == "[]\n"
    ended = reprieve("doctor", str(tmp_path), "--sample", "16MB")
    assert "safetensors" in ended.stdout and not ended.stderr.startswith("Traceback"), ended


@pytest.mark.parametrize(
    ("code", "what"),
    [
        ("import reprieve; reprieve.Run", "reprieve.Run"),
        ("from reprieve import Checkpointer", "reprieve.Checkpointer"),
        ("import reprieve.dcp", "reprieve.dcp"),
    ],
)
def test_what_needs_torch_names_itself_and_the_extra(code: str, what: str) -> None:
    ended = python(code)
    assert ended.stderr.splitlines()[-1] == (
        f"reprieve.errors.MissingExtra: {what} needs torch, which is not installed: pip install 'reprieve[torch]'"
    )


def test_a_fine_tuning_fails_for_good(tmp_path: Path) -> None:
    """No restart installs a package."""
    for name in ("config.json", "tokenizer.json", "model.safetensors", "data.jsonl"):
        (tmp_path / name).write_text("{}")
    data, output = str(tmp_path / "data.jsonl"), str(tmp_path / "out")
    ended = reprieve("finetune", "--model_name", str(tmp_path), "--dataset_path", data, "--output_dir", output)
    assert ended.returncode == 42, ended
    assert "reprieve finetune needs torch, which is not installed: pip install" in ended.stderr, ended


def test_a_checkpoint_of_other_tools_is_not_verified_without_it(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-1").mkdir()
    torch.save({"weight": torch.ones(3)}, tmp_path / "checkpoint-1" / "model.pt")
    ended = reprieve("verify", str(tmp_path))
    assert ended.returncode == 2, ended
    assert ended.stderr.strip().endswith("needs torch, which is not installed: pip install 'reprieve[torch]'"), ended


def test_the_package_does_not_depend_on_it() -> None:
    from importlib.metadata import requires

    hard = [each for each in requires("reprieve") or [] if "extra ==" not in each]
    assert hard and not any(each.startswith(("torch", "transformers")) for each in hard)
