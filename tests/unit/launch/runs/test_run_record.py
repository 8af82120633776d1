"""The run record: complete or absent, readable only for its user, one launcher per run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from reprieve.checkpoint.folder.attempts import AttemptRecord
from reprieve.errors import ConfigError
from reprieve.host import boot_id
from reprieve.launch.process import start_time
from reprieve.launch.runs.run_record import (
    VERSION,
    RunFolder,
    RunRecord,
    Runs,
    check_name,
    default_name,
    state_folder,
)  # fmt: skip
from reprieve.run_state import RunState
from reprieve.testing.faulty_disks import FullDisk


def record(name: str = "train-1", **changes: object) -> RunRecord:
    found = RunRecord(name, ["python", "train.py", "größe \udcff"], "/home/me", {"keep": "2"}, {"A": "1"}, ["HF_TOKEN"])
    for key, value in changes.items():
        setattr(found, key, value)
    return found


def full() -> RunRecord:
    first = AttemptRecord(1000.0, training=1010.0, kept_until=1050.0, from_step=0, to_step=40)
    first.end(1060.0, "failed")
    return record(
        state=RunState.RUNNING, reason="r", exit_code=3, pid=7, pid_started="9", boot="b", socket="/s",
        attempts=[first, AttemptRecord(1070.0)],
        step=41, done=0.5, eta_s=12.5, restarts=1, checkpoints="/c", checkpoint_step=40, checkpoint_at=1051.0,
    )  # fmt: skip


def test_it_comes_back_as_it_was_written() -> None:
    assert RunRecord.from_json(full().to_json()) == full()


def test_what_a_newer_version_added_is_passed_over() -> None:
    content = json.loads(full().to_json())
    content["of_tomorrow"] = {"x": 1}
    for attempt in content["attempts"]:
        attempt["also_of_tomorrow"] = 2
    assert RunRecord.from_json(json.dumps(content).encode()) == full()


def test_a_record_of_a_newer_version_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "train-1"
    folder.mkdir(parents=True)
    newer = {**json.loads(full().to_json()), "version": VERSION + 1}
    (folder / "run.json").write_text(json.dumps(newer))
    with pytest.raises(
        ConfigError, match=f"'train-1' has version {VERSION + 1}, and this Reprieve reads versions up to"
    ):
        Runs(tmp_path).find("train-1")
    assert Runs(tmp_path).all() == []


def test_a_record_without_a_version_is_of_the_first(tmp_path: Path) -> None:
    content = json.loads(full().to_json())
    assert content.pop("version") == VERSION
    assert RunRecord.from_json(json.dumps(content).encode()) == full()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0" * 4096,
        b"{}",
        full().to_json()[:-100],
        full().to_json()[:1],
        b"\xff\xfe",
        b"null",
        b"[]",
        b'"run"',
        b"7",
    ],
    ids=["empty", "zeros", "no fields", "cut", "cut at once", "no text", "null", "list", "string", "number"],
)
def test_what_is_torn_is_no_record(data: bytes, tmp_path: Path) -> None:
    runs = Runs(tmp_path)
    folder = runs.folder("torn")
    folder.mkdir(parents=True)
    (folder / "run.json").write_bytes(data)
    assert RunFolder(folder).read() is None
    assert runs.all() == []
    with pytest.raises(ConfigError, match="no run 'torn'"):
        runs.find("torn")


def test_it_is_found_by_name_and_the_newest_is_first(tmp_path: Path) -> None:
    runs = Runs(tmp_path)
    with pytest.raises(ConfigError, match="none was started here yet"):
        runs.find("a")
    for name in ("a", "b"):
        with runs.hold(name) as folder:
            folder.write(record(name))
            assert folder.problem is None
    assert [found.name for found in runs.all()] == ["b", "a"]
    assert runs.find("a").left_out == ["HF_TOKEN"]
    with pytest.raises(ConfigError, match=r"no run 'c'\. Known runs: b, a"):
        runs.find("c")


def test_only_this_user_can_read_it(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        with Runs(tmp_path / "state").hold("a") as folder:
            folder.write(record())
            folder.write(record())
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (folder.path, *folder.path.iterdir())}
    assert modes == {"a": 0o700, "run.json": 0o600, "lock": 0o600}


def test_a_second_launcher_of_the_same_command_has_a_record_of_its_own(tmp_path: Path) -> None:
    runs = Runs(tmp_path)
    with runs.hold("a") as first, runs.hold("a") as second, runs.hold("a") as third:
        assert (first.name, second.name, third.name) == ("a", "a-2", "a-3")
    with runs.hold("a") as again:
        assert again.name == "a", "free again"


def test_where_no_folder_can_be_made_the_run_goes_on(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with Runs(tmp_path / "file").hold("a") as folder:
        assert "Not a directory" in str(folder.problem)
        folder.problem = None
        folder.write(record())
        assert "Not a directory" in str(folder.problem)
        assert folder.read() is None


def test_a_full_disk_is_a_problem_until_there_is_room_again(tmp_path: Path) -> None:
    with Runs(tmp_path).hold("a") as folder:
        folder.write(record(step=1))
        folder._disk = FullDisk(100)
        folder.write(record(step=2))
        assert "No space left" in str(folder.problem)
        assert str(folder.path) in str(folder.problem)
        found = folder.read()
        assert found is not None
        assert found.step == 1, "the old one is still whole"
        folder._disk = FullDisk(100_000)
        folder.write(record(step=3))
        assert folder.problem is None
        assert Runs(tmp_path).find("a").step == 3


# Names


@pytest.mark.parametrize("name", ["../x", "", "a/b", ".", "..", ".hidden", "-x", "a b", "a\n", "ä", "x" * 101])
def test_what_cannot_be_a_name(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be the name of a run"):
        check_name(name)
    with pytest.raises(ConfigError, match="cannot be the name of a run"):
        Runs(tmp_path).folder(name)


@pytest.mark.parametrize("name", ["a", "train-0a1b2c", "1.5B_v2", "x" * 100])
def test_what_can_be_a_name(name: str) -> None:
    check_name(name)
    assert Runs(Path("/s")).folder(name) == Path("/s/runs") / name


def test_the_same_command_has_the_same_name_and_another_has_another() -> None:
    words = ("python", "train.py", "--lr", "1")
    name = default_name("train", words, "/home/me", None)
    assert name == default_name("train", words, "/home/me", None)
    assert name.startswith("train-")
    others = {
        default_name("train", ("python", "train.py", "--lr", "2"), "/home/me", None),
        default_name("train", ("python", "train.py", "--lr 1"), "/home/me", None),
        default_name("train", words, "/home/you", None),
        default_name("train", words, "/home/me", "/checkpoints"),
    }
    assert len(others | {name}) == 5


@pytest.mark.parametrize("script", ["train", "my script", "größe", "..", "-", "", "x" * 300, "a/../b"])
def test_whatever_the_script_is_called_it_makes_a_name(script: str) -> None:
    check_name(default_name(script, ("python",), "/", None))


def test_an_argument_that_is_no_text_makes_a_name() -> None:
    """File names may be any bytes on Linux; Python represents bytes that are not UTF-8 as surrogates."""
    check_name(default_name("train", ("train.py", os.fsdecode(b"data-\xff")), "/", None))


@pytest.mark.parametrize(
    ("env", "folder"),
    [
        ({"REPRIEVE_STATE_DIR": "/s", "XDG_STATE_HOME": "/x"}, Path("/s")),
        ({"XDG_STATE_HOME": "/x"}, Path("/x/reprieve")),
        ({}, Path("~/.local/state/reprieve").expanduser()),
    ],
)
def test_where_the_records_are(env: dict[str, str], folder: Path) -> None:
    assert state_folder(env) == folder


# Is its launcher alive?


def test_it_is_as_alive_as_its_launcher() -> None:
    running = record(state=RunState.RUNNING)
    assert running.state_now == RunState.LOST, "nobody has it yet"
    running.set_launcher()
    assert (running.alive, running.state_now) == (True, RunState.RUNNING)
    running.boot = "before the machine was booted again"
    assert running.state_now == RunState.LOST


@pytest.mark.parametrize("state", [RunState.STARTING, RunState.RUNNING, RunState.STOPPING, RunState.WAITING])
def test_a_run_whose_launcher_is_dead_is_lost(state: str) -> None:
    launcher = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
    found = record(state=state, pid=launcher.pid, pid_started=start_time(launcher.pid), boot=boot_id())
    assert found.state_now == state
    launcher.kill()
    os.waitid(os.P_PID, launcher.pid, os.WEXITED | os.WNOWAIT)
    assert found.state_now == RunState.LOST, "a zombie"
    launcher.communicate()
    assert found.state_now == RunState.LOST


def test_another_process_with_the_same_number_is_not_its_launcher() -> None:
    found = record(state=RunState.RUNNING)
    found.set_launcher()
    found.pid_started = "1"
    assert found.state_now == RunState.LOST


@pytest.mark.parametrize("state", ["finished", "failed", "preempted", "paused", "hung"])
def test_how_it_ended_stays_true(state: str) -> None:
    assert record(state=state).state_now == state
