"""The example scripts and the programs of the guide, run as a reader would run them."""

from __future__ import annotations

import difflib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.support.places import HIDE_OPTIONAL, ROOT

EXAMPLES = ROOT / "examples"


def start(script: str, folder: Path, ranks: int = 1) -> subprocess.Popen[str]:
    folder.mkdir(exist_ok=True)
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    return subprocess.Popen(
        [sys.executable, *torchrun, str(EXAMPLES / script)],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **HIDE_OPTIONAL},
    )


def printed(output: str) -> list[str]:
    """The lines of the script up to the number: log lines may come between that and the end of the line."""
    return re.findall(r"^epoch .*?\.\d+", output, re.MULTILINE)


def rest_of(process: subprocess.Popen[str], limit_s: float) -> str:
    """Read the output after the lines that were read. (`communicate` would lose what `readline` has buffered.)"""
    assert process.stdout is not None
    killer = threading.Timer(limit_s, process.kill)
    killer.start()
    with process.stdout as stream:
        rest = stream.read()
    process.wait()
    killer.cancel()
    return rest


@pytest.mark.parametrize(
    ("plain", "safe"), [("plain_pytorch.py", "plain_pytorch_safe.py"), (None, "accelerate_safe.py")]
)
def test_an_example_stopped_and_started_again(plain: str | None, safe: str, tmp_path: Path) -> None:
    undisturbed = start(plain or safe, tmp_path / "undisturbed")
    expected = printed(undisturbed.communicate(timeout=200)[0])
    assert undisturbed.returncode == 0
    assert len(expected) > 50
    lines: list[str] = []
    for stop_after in (len(expected) // 4, len(expected) // 3):
        process = start(safe, tmp_path / "stopped")
        assert process.stdout is not None
        lines += printed("".join(process.stdout.readline() for _ in range(stop_after)))
        process.send_signal(signal.SIGTERM)
        began = time.monotonic()
        rest = rest_of(process, 100)
        assert process.returncode == 143, rest
        assert time.monotonic() - began < 60
        assert "saved step" in rest
        lines += printed(rest)
    process = start(safe, tmp_path / "stopped")
    lines += printed(process.communicate(timeout=200)[0])
    assert process.returncode == 0
    assert lines == expected
    rerun = start(safe, tmp_path / "stopped")
    assert "already finished" in rerun.communicate(timeout=200)[0]
    assert rerun.returncode == 0


def test_accelerate_on_two_ranks(tmp_path: Path) -> None:
    undisturbed = start("accelerate_safe.py", tmp_path / "undisturbed", ranks=2)
    expected = printed(undisturbed.communicate(timeout=200)[0])
    assert len(expected) == 48
    process = start("accelerate_safe.py", tmp_path / "stopped", ranks=2)
    assert process.stdout is not None
    first = ""
    while first.count("epoch") < 20:
        first += process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    first += rest_of(process, 100)
    assert first.count("reprieve: saved step") == 1, first  # once, not once per rank
    process = start("accelerate_safe.py", tmp_path / "stopped", ranks=2)
    second = process.communicate(timeout=200)[0]
    assert process.returncode == 0
    assert printed(first) + printed(second) == expected


def test_six_lines_make_the_difference() -> None:
    plain, safe = ((EXAMPLES / name).read_text() for name in ("plain_pytorch.py", "plain_pytorch_safe.py"))
    code = [text.split('"""', 2)[2].splitlines() for text in (plain, safe)]
    changed = [line for line in difflib.ndiff(*code) if line.startswith("+ ") and line.strip() != "+"]
    assert len(changed) <= 6, changed


def test_the_programs_of_the_guide(tmp_path: Path) -> None:
    """Those that are whole programs: the first one is run twice, then stock code reads what it saved."""
    page = (ROOT / "docs/guide.md").read_text()
    programs = [code for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "import torch\n" in code]
    first_use, without_reprieve, stock_checkpoint = programs
    expected = {
        first_use: ["resumed from None\n", "resumed from checkpoint-50\n"],
        without_reprieve: [""],
        stock_checkpoint: ["500\n"],
    }
    for program, outputs in expected.items():
        for output in outputs:
            ended = subprocess.run(
                [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=100
            )
            assert (ended.stdout, ended.returncode) == (output, 0), ended.stderr
