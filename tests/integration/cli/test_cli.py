"""The commands as real processes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import reprieve
from reprieve import Checkpointer
from reprieve.cli import COMMANDS
from tests.support.places import ROOT

COMMAND = [str(Path(sys.executable).with_name("reprieve"))]


def run(*args: object, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([*COMMAND, *map(str, args)], capture_output=True, text=True, timeout=60)
    assert done.returncode == code, done.stderr
    return done


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("cli") / "checkpoints"
    with Checkpointer(root, name="cli", keep=None, model=torch.nn.Linear(100, 100)) as checkpointer:
        for step in (10, 20, 30):
            checkpointer.save(step, epoch=step / 10, metrics={"loss": 1 / step})
    damaged = root / "checkpoint-20" / "model.safetensors"
    data = bytearray(damaged.read_bytes())
    data[1000] ^= 1
    damaged.write_bytes(data)
    (root / "checkpoint-30" / "rng_state.pth").unlink()
    return root


def test_ls(folder: Path) -> None:
    done = run("ls", folder)
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["checkpoint-30", "checkpoint-20", "checkpoint-10"]
    assert lines[1].rstrip().endswith("rng_state.pth is missing")
    assert lines[3].rstrip().endswith("valid")
    assert not done.stderr


def test_ls_json(folder: Path) -> None:
    newest, damaged, oldest = json.loads(run("ls", folder, "--json").stdout)
    assert (newest["step"], newest["valid"], newest["problem"]) == (30, False, "rng_state.pth is missing")
    assert damaged["valid"], "a look at sizes does not see a bit"
    assert (oldest["epoch"], oldest["run"], oldest["metrics"]) == (1.0, "cli", {"loss": 0.1})


def test_verify(folder: Path) -> None:
    done = run("verify", folder, code=1)
    bad, damaged, good = done.stdout.splitlines()
    assert "not valid: rng_state.pth is missing" in bad
    assert re.search(r"checkpoint-20: not valid: model.safetensors is damaged: block 0 \(bytes 0 to 40,\d+\)", damaged)
    assert re.search(r"checkpoint-10: valid \(.* GB/s\)", good)
    assert "valid" in run("verify", folder / "checkpoint-10").stdout
    (one,) = json.loads(run("verify", folder / "checkpoint-20", "--json", code=1).stdout)
    assert "block 0" in one["problem"]


def test_show(folder: Path) -> None:
    text = run("show", folder / "checkpoint-10").stdout
    for part in ("cli, attempt 1", "loss=0.1", "model.safetensors", f"torch {torch.__version__}", "a fresh start"):
        assert part in text
    shown = json.loads(run("show", folder / "checkpoint-10", "--json").stdout)
    assert set(shown["files"]) == {"model.safetensors", "rng_state.pth"}
    assert run("show", folder, code=1).stdout.splitlines()[1].split() == ["step", "30"]


def test_bad_input_is_an_error_that_names_it(tmp_path: Path) -> None:
    for command in ("ls", "show", "verify"):
        done = run(command, tmp_path / "nowhere", code=2)
        assert "nowhere does not exist" in done.stderr and not done.stdout
    (tmp_path / "file").touch()
    assert "file is not a folder" in run("ls", tmp_path / "file", code=2).stderr
    assert "no checkpoints" in run("ls", tmp_path).stderr
    assert json.loads(run("ls", tmp_path, "--json").stdout) == []
    assert "s3://bucket/x" in run("ls", "s3://bucket/x", code=2).stderr


def test_help_has_examples() -> None:
    for command in COMMANDS:
        shown = run(command, "--help").stdout
        assert re.search(rf"examples?:\s+([A-Z_]+=\w+ )?reprieve {command}", shown), shown
    everything = run("--help").stdout
    assert all(command in everything for command in COMMANDS) and "reprieve run" in everything
    assert run("--version").stdout.strip() == reprieve.__version__


def test_nothing_here_imports_torch(folder: Path) -> None:
    code = "import sys; from reprieve.cli import execute\nexecute(sys.argv[1:])\nprint('torch' in sys.modules)\n"
    for args in (["ls", str(folder)], ["verify", str(folder / "checkpoint-10")]):
        done = subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, timeout=60)
        assert done.stdout.splitlines()[-1] == "False", done.stderr


def test_the_demo() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "examples.demo"], cwd=ROOT,
        capture_output=True, text=True, timeout=250, env={**os.environ, "COLUMNS": "200"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "80 of 80" in done.stdout and "nothing lost" in done.stdout
    assert "passed over checkpoint-30: model.safetensors is damaged" in done.stdout
