"""`ls`, `verify` and `show` with odd names, during a training, and without permission."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from reprieve import Checkpointer
from reprieve.checkpoint.folder import catalog, commit
from reprieve.checkpoint.folder import verify as verifying
from reprieve.checkpoint.io import reader
from reprieve.cli import execute
from reprieve.storage.disk import Disk
from tests.support.helpers import small_model


def run_with(root: Path, *steps: int, run: str = "r") -> None:
    with Checkpointer(root, name=run, keep=None, model=small_model()) as checkpointer:
        for step in steps:
            checkpointer.save(step)


def refuse(*_: object, **__: object) -> Any:
    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make tables wide enough for any path of pytest."""
    monkeypatch.setattr("reprieve.cli.output.data._width", 1000)


@pytest.mark.usefixtures("wide")
def test_names_with_brackets_are_printed_as_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = tmp_path / "run[lr=1e-3][/x]"
    run_with(root, 1, run="[red]run[/] :smile:")
    assert execute(["ls", str(root)]) == 0
    assert "[red]run[/] :smile: #1" in capsys.readouterr().out
    assert execute(["verify", str(root)]) == 0
    assert f"{root}/checkpoint-1: valid (" in capsys.readouterr().out
    assert execute(["show", str(root)]) == 0
    shown = capsys.readouterr().out
    assert f"{root}/checkpoint-1" in shown and "[red]run[/] :smile:, attempt 1" in shown
    commit.quarantine(Disk(), root / "checkpoint-1", "tensor [bold]x[/y] is damaged")
    assert execute(["ls", str(root)]) == 0
    assert "quarantined: tensor [bold]x[/y] is damaged" in capsys.readouterr().out
    assert execute(["verify", str(root)]) == 1
    assert "checkpoint-1.set-aside: not valid: quarantined: tensor [bold]x[/y] is damaged" in capsys.readouterr().out
    commit.remove(Disk(), root / "checkpoint-1.set-aside")
    for command in ("ls", "verify"):
        assert execute([command, str(root)]) == 0
        assert f"no checkpoints in {root}\n" in capsys.readouterr().err
    assert execute(["show", str(root)]) == 2
    assert f"no checkpoints in {root}\n" in capsys.readouterr().err


def test_one_that_is_removed_meanwhile_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_with(tmp_path, 1, 2, 3)
    real = verifying.verify

    def retention_is_quicker(path: Path, *args: Any, **options: Any) -> Any:
        if path.name == "checkpoint-2":
            commit.remove(Disk(), path)
        return real(path, *args, **options)

    monkeypatch.setattr(verifying, "verify", retention_is_quicker)
    assert execute(["verify", "--json", str(tmp_path)]) == 0
    output = capsys.readouterr()
    assert [result["step"] for result in json.loads(output.out)] == [3, 1]
    assert output.err.strip() == f"{tmp_path}/checkpoint-2 was removed meanwhile: left out"


@pytest.mark.usefixtures("wide")
def test_one_that_may_not_be_read_is_a_problem_in_its_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_with(tmp_path, 1)
    with monkeypatch.context() as patch:
        patch.setattr(catalog, "read_manifest", refuse)
        for command, where, code in (("ls", "", 0), ("verify", "", 1), ("show", "", 1), ("show", "checkpoint-1", 1)):
            assert execute([command, str(tmp_path / where)]) == code
            assert "cannot be read: Permission denied" in capsys.readouterr().out
    monkeypatch.setattr(reader, "open_for_reading", refuse)
    assert execute(["verify", str(tmp_path)]) == 1
    assert "checkpoint-1: not valid: cannot be read: Permission denied" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["ls", "verify", "show"])
def test_a_folder_that_may_not_be_read_is_an_error_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    monkeypatch.setattr(catalog, "list_checkpoints", refuse)
    assert execute([command, str(tmp_path)]) == 2
    assert f"error: cannot use {tmp_path} for checkpoints: no permission" in capsys.readouterr().err


@pytest.mark.parametrize("count", [1, 2])
def test_where_all_were_set_aside_none_is_valid(tmp_path: Path, capsys: pytest.CaptureFixture[str], count: int) -> None:
    run_with(tmp_path, *range(count))
    for step in range(count):
        commit.quarantine(Disk(), tmp_path / f"checkpoint-{step}", "damaged")
    assert execute(["verify", str(tmp_path)]) == 1
    assert capsys.readouterr().out.count("not valid: quarantined: damaged") == count
    run_with(tmp_path, 5)
    assert execute(["verify", str(tmp_path)]) == 0
    assert "quarantined" not in capsys.readouterr().out
