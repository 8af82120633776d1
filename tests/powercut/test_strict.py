"""No flush is missing and none is redundant: with all of them every crash keeps the promises, and without any single
one of them some crash breaks them (see strict.py)."""

from __future__ import annotations

import itertools
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from reprieve.checkpoint.folder import lease, paths, startup
from reprieve.checkpoint.folder.catalog import list_checkpoints
from reprieve.checkpoint.format.layout import bytes_layout
from reprieve.checkpoint.format.manifest import read_manifest
from reprieve.storage.disk import Disk
from tests.powercut.rigs.promise import Job, check_visible
from tests.powercut.rigs.strict import Op, Recording, build, crash_states

Check = Callable[[Path, list[str]], None]
SET_UP_DONE = "set up"
"""Flushes before this mark are the scenario's own."""


@pytest.fixture
def quiet_heartbeat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease.FolderLease, "_keep_alive", lambda self: None)


def saves_and_retention(root: Path, disk: Recording) -> Check:
    """Four saves that keep two checkpoints; something invalid has the name of the third."""
    job = Job()
    checkpointer = job.checkpointer(root, disk=disk)
    disk.mark("started")
    for step in range(1, 5):
        if step == 3:
            disk.make_folder(root / "checkpoint-3")
        checkpointer.save(step=job.at(step).extra["seen"])
        disk.mark(f"saved {step}")
        checkpointer.wait()

    def check(top: Path, marks: list[str]) -> None:
        here = top / "checkpoints"
        check_attempt(here, marks)
        empty = here / "checkpoint-3"
        if empty.is_dir() and not list(empty.iterdir()):
            empty.rmdir()  # what the test put there
        check_visible(here, max((int(mark.split()[1]) for mark in marks if mark.startswith("saved")), default=0))
        if "saved 3" in marks:
            reasons = [info.problem for info in list_checkpoints(here) if paths.step_of_quarantined(info.path) == 3]
            assert len(reasons) == 1 and "newer save" in str(reasons[0]), "the reason for the quarantine is lost"

    return check


def a_save_with_files_in_sub_folders(root: Path, disk: Recording) -> Check:
    checkpointer = Job().at(1).checkpointer(root, disk=disk)
    disk.mark("started")
    files = [bytes_layout(name, b"x" * 5000) for name in ("inner/x.bin", "inner/more/y.bin")]
    checkpointer.save(1, extra_files=lambda: files)
    disk.mark("saved 1")

    def check(top: Path, marks: list[str]) -> None:
        here = top / "checkpoints"
        check_attempt(here, marks)
        check_visible(here, 1 if "saved 1" in marks else 0)

    return check


def a_second_attempt_that_starts_over(root: Path, disk: Recording) -> Check:
    first = Job().at(1).checkpointer(root, disk=disk)
    disk.mark("started")
    first.save(1)
    first.close()
    disk.mark("first is done")
    Job().checkpointer(root, disk=disk, fresh=True)
    disk.mark("started")

    def check(top: Path, marks: list[str]) -> None:
        here = top / "checkpoints"
        if "first is done" in marks:
            kept = [path for path in here.rglob("checkpoint-1") if path.is_dir()]
            assert len(kept) == 1, "starting over has lost the old checkpoint"
            check_visible(kept[0].parent, 1)
        check_attempt(here, marks)
        if marks.count("started") == 2:
            assert not list_checkpoints(here), "the second attempt would resume from what it should start over from"

    return check


def a_resume_that_finds_the_newest_damaged(root: Path, disk: Recording) -> Check:
    first = Job().checkpointer(root, disk=disk)
    disk.mark("started")
    for step in (1, 2):
        first.save(step)
    first.close()
    disk.replace_file(root / "checkpoint-2" / "model.safetensors", b"damaged")
    disk.mark(SET_UP_DONE)
    second = Job().checkpointer(root, disk=disk)
    disk.mark("started")
    restored = second.restore()
    assert restored is not None and restored.step == 1
    disk.mark("resumed")

    def check(top: Path, marks: list[str]) -> None:
        here = top / "checkpoints"
        check_attempt(here, marks)
        if SET_UP_DONE in marks:
            assert (here / "checkpoint-1").is_dir()
        if "resumed" in marks:
            problems = {info.path.name: info.problem for info in list_checkpoints(here)}
            assert problems["checkpoint-1"] is None and "7 bytes" in problems["checkpoint-2.set-aside"]

    return check


def a_save_that_replaces_a_valid_one(root: Path, disk: Recording) -> Check:
    checkpointer = Job().at(1).checkpointer(root, disk=disk)
    disk.mark("started")
    checkpointer.save(1, metrics={"save": 1})
    disk.mark("saved 1")
    checkpointer.save(1, metrics={"save": 2}, replace=True)
    disk.mark("replaced 1")

    def check(top: Path, marks: list[str]) -> None:
        here = top / "checkpoints"
        check_attempt(here, marks)
        check_visible(here, 1 if "saved 1" in marks else 0)
        if "replaced 1" in marks:
            assert read_manifest(here / "checkpoint-1").metrics == {"save": 2}

    return check


def the_same_where_names_cannot_be_exchanged(root: Path, disk: Recording) -> Check:
    """The next start may have to give the old checkpoint its name back."""
    disk.exchange = lambda first, second: False  # type: ignore[method-assign]
    check = a_save_that_replaces_a_valid_one(root, disk)

    def start_and_check(top: Path, marks: list[str]) -> None:
        if (top / "checkpoints").is_dir():
            startup.clean_up(Disk(), top / "checkpoints")
        check(top, marks)

    return start_and_check


def check_attempt(root: Path, marks: list[str]) -> None:
    """A start whose record is lost cannot fence another attempt."""
    if "started" in marks:
        record = json.loads((root / paths.LEASE_FOLDER / "owner.json").read_bytes())
        assert record["attempt"] >= marks.count("started")


SCENARIOS = [
    saves_and_retention,
    a_save_with_files_in_sub_folders,
    a_second_attempt_that_starts_over,
    a_resume_that_finds_the_newest_damaged,
    a_save_that_replaces_a_valid_one,
    the_same_where_names_cannot_be_exchanged,
]


@pytest.mark.usefixtures("quiet_heartbeat")
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_every_flush_is_needed_and_no_more_are(scenario: Callable[..., Check], tmp_path: Path) -> None:
    log: list[Op] = []
    check = scenario(tmp_path / "checkpoints", Recording(log))
    shm = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else tmp_path
    scratch = shm / f"reprieve-strict-{os.getpid()}"
    try:
        broken = list(violations(log, tmp_path, check, scratch))
        assert broken == []
        first = log.index(("mark", SET_UP_DONE)) if ("mark", SET_UP_DONE) in log else 0
        flushes = [number for number, op in enumerate(log) if number > first and op[0].startswith("flush")]
        assert len(flushes) >= 5
        idle = []
        for number in flushes:
            without = log[:number] + log[number + 1 :]
            if not any(violations(without, tmp_path, check, scratch, after=number)):
                idle.append((number, *log[number]))
        assert not idle, f"flushes whose absence no crash shows: {idle}"
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def violations(log: list[Op], top: Path, check: Check, scratch: Path, *, after: int = 0) -> Iterator[str]:
    for number, (marks, found) in zip(itertools.count(), crash_states(log, top, after=after), strict=False):
        place = scratch / str(number)
        build(found, place)
        try:
            check(place, marks)
        except Exception as error:  # noqa: BLE001 - whatever the check raises is its verdict
            yield f"after {marks}: {error!r}"
        finally:
            shutil.rmtree(place)
