"""The command as typed and as started, and where the options of reprieve end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from reprieve.cli import _parser, run
from reprieve.launch.command import Command, NotFound, parse

ODD = ["a b", "'", '"', "größe", "", "*", "$HOME", "two\nlines", "--", "-x=1", "`id`", "日本", "\\"]


def script(path: Path, text: str = "import json, sys; print(json.dumps(sys.argv[1:]))", *, mode: int = 0o644) -> Path:
    path.write_text(text, encoding="utf-8")
    path.chmod(mode)
    return path


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_script_is_run_by_this_interpreter(here: Path) -> None:
    script(here / "train.py")
    for word in ("train.py", "./train.py", str(here / "train.py")):
        assert parse([word, "--lr", "1"]) == Command((word, "--lr", "1"), (sys.executable, word, "--lr", "1"))


def test_a_script_with_spaces_in_its_name(here: Path) -> None:
    script(here / "my größe.py")
    assert parse(["my größe.py"]).argv == (sys.executable, "my größe.py")


def test_a_program_is_found_on_the_path_of_the_command(here: Path) -> None:
    tool = script(here / "tool", "#!/bin/sh\n", mode=0o755)
    assert parse(["tool", "x"], {"PATH": f"/nowhere:{here}"}) == Command(("tool", "x"), (str(tool), "x"))


@pytest.mark.parametrize("word", ["bin/tool", "./bin/tool", "./bin/tool.py"])
def test_a_relative_path_stays_relative(word: str, here: Path) -> None:
    (here / "bin").mkdir()
    script(here / word, "#!/bin/sh\n", mode=0o755)
    assert parse([word, "x"], {"PATH": "/nowhere"}).argv == (word, "x")


def test_a_script_that_may_be_executed_is_found_where_it_is(here: Path) -> None:
    """Some file systems report every file as executable, and scripts are not on the path."""
    script(here / "train.py", "#!/usr/bin/env python\n", mode=0o755)
    assert parse(["train.py", "x"], {"PATH": "/nowhere"}).argv[-2:] in (
        ("train.py", "x"),
        (str(here / "train.py"), "x"),
    )


def test_what_is_not_on_the_path_may_lie_beside_this_interpreter() -> None:
    beside = Path(sys.executable).parent / "torchrun"
    assert parse(["torchrun", "train.py"], {"PATH": "/nowhere"}).argv == (str(beside), "train.py")


def test_arguments_arrive_as_they_were_typed(here: Path) -> None:
    script(here / "show.py")
    for words in (["show.py", *ODD], [sys.executable, "show.py", *ODD]):
        command = parse(words)
        assert command.words == tuple(words)
        printed = subprocess.run(command.argv, check=True, capture_output=True, env={**os.environ, "PYTHONUTF8": "1"})
        assert json.loads(printed.stdout) == ODD


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ([], 2, "reprieve run python train.py"),
        (["missing.py"], 127, "missing.py does not exist (in "),
        (["no-such-tool"], 127, "no-such-tool: no such command"),
        (["./no-such-tool"], 127, "./no-such-tool: no such command"),
        (["./plain"], 126, "./plain cannot be executed"),
        (["./folder"], 126, "./folder cannot be executed"),
        (["plain"], 127, "plain: no such command"),
    ],
)
def test_what_cannot_be_started_has_the_codes_of_a_shell(words: list[str], code: int, message: str, here: Path) -> None:
    script(here / "plain")
    (here / "folder").mkdir()
    with pytest.raises(NotFound) as caught:
        parse(words)
    assert caught.value.code == code
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("train.py --lr 1", "train"),
        ("python src/train_big.py config.py", "train_big"),
        ("torchrun --nproc-per-node 2 train.py", "train"),
        ("accelerate launch --num_processes 2 a/b/train.py", "train"),
        ("python -m package.train --lr 1", "train"),
        ("python -m train", "train"),
        ("python -c pass", "python"),
        ("python -m", "python"),
        ("/opt/tools/run.sh x", "run"),
        ("./tool", "tool"),
    ],
)
def test_what_a_command_is_about(words: str, name: str) -> None:
    assert Command(tuple(words.split()), ()).script == name


def understood(words: list[str]) -> Namespace:
    return _parser("run", run).parse_args(words)


@pytest.mark.parametrize(
    ("typed", "options", "command"),
    [
        ("python train.py", {}, "python train.py"),
        ("train.py --keep 5", {}, "train.py --keep 5"),
        ("--keep 2 python train.py --keep 5", {"keep": "2"}, "python train.py --keep 5"),
        ("--keep=2 python train.py", {"keep": "2"}, "python train.py"),
        ("--fresh python train.py --fresh -h", {"fresh": True}, "python train.py --fresh -h"),
        ("--fresh --keep 2 --explain x", {"fresh": True, "keep": "2", "explain": True}, "x"),
        ("--kill-wait 5s --detach x -h", {"kill_wait": "5s", "detach": True}, "x -h"),
        ("--name run run x", {"name": "run"}, "run x"),
        ("python train.py -- x", {}, "python train.py -- x"),
        ("--explain", {"explain": True}, ""),
    ],
)
def test_where_our_options_end(typed: str, options: dict[str, Any], command: str) -> None:
    found = vars(understood(typed.split()))
    assert found.pop("command") == command.split()
    assert {name: value for name, value in found.items() if value} == options


def test_words_are_not_taken_apart() -> None:
    assert understood(["a b", *ODD]).command == ["a b", *ODD]


def test_two_dashes_before_the_command_say_that_it_begins() -> None:
    assert parse(understood(["--keep", "2", "--", sys.executable, "--", "x"]).command).words == (
        sys.executable,
        "--",
        "x",
    )
