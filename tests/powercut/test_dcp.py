"""DCP checkpoints and crashes: every flush of a save is needed and none is missing, and SIGKILL at any change to the
disk leaves a whole checkpoint under the name (see strict.py)."""

from __future__ import annotations

import os
import shutil
import signal
import warnings
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from reprieve.adapters.dcp import save_folder
from reprieve.checkpoint.buffers.block_pool import BlockPool
from reprieve.checkpoint.folder.verify import verify
from reprieve.dcp import StorageReader, StorageWriter
from reprieve.storage.disk import Disk
from tests.powercut.rigs.strict import Op, Recording, build, crash_states
from tests.support.jobs.dcp_jobs import Dies

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")


def state(number: int) -> dict[str, Any]:
    return {"weight": torch.full((50, 7), float(number)), "number": number}


def save(path: Path, number: int, disk: Disk) -> None:
    dcp.save(state(number), storage_writer=StorageWriter(path, disk=disk))
    save_folder.wait_for_removals()


def number_at(path: Path) -> int:
    """The number of the whole state that a reader finds; 0 for none."""
    if not save_folder.find_complete(path).exists():
        return 0
    found = state(0)
    try:
        dcp.load(found, storage_reader=StorageReader(path))
    except dcp.CheckpointException as error:  # no Exception, by its class
        raise AssertionError(f"not whole: {error}") from error
    assert torch.equal(found["weight"], state(found["number"])["weight"])
    if path.exists():
        verify(path, BlockPool(limit=1))  # what has the name is whole, whoever looks
    return int(found["number"])


def test_every_flush_is_needed_and_no_more_are(tmp_path: Path) -> None:
    log: list[Op] = []
    disk = Recording(log)
    path = tmp_path / "checkpoints" / "last"
    save(path, 1, disk)
    disk.mark("saved 1")
    disk.write_file(path / "config.json", b"{}")
    disk.flush_folder(path)
    disk.mark("config")
    save(path, 2, disk)
    disk.mark("saved 2")

    def check(top: Path, marks: list[str]) -> None:
        last = top / "checkpoints" / "last"
        assert number_at(last) >= sum(mark.startswith("saved") for mark in marks)
        assert last.is_dir() or "saved 2" not in marks, "only we would find it"
        if "config" in marks:
            kept = [file.read_bytes() for file in top.rglob("config.json")]
            assert kept == [b"{}"], "what others had put beside it is lost"
        # And from here on: the next save puts everything in order.
        save(last, 3, Disk())
        assert number_at(last) == 3 and os.listdir(last.parent) == ["last"]
        assert "config" not in marks or (last / "config.json").read_bytes() == b"{}"

    shm = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else tmp_path
    scratch = shm / f"reprieve-dcp-{os.getpid()}"
    own = {log.index(("mark", "saved 1")) + offset for offset in range(1, 6)}
    try:
        assert list(violations(log, tmp_path, check, scratch)) == []
        flushes = [number for number, op in enumerate(log) if op[0].startswith("flush") and number not in own]
        idle = [
            (number, *log[number])
            for number in flushes
            if not any(violations(log[:number] + log[number + 1 :], tmp_path, check, scratch, after=number))
        ]
        assert not idle, f"flushes whose absence no crash shows: {idle}"
        assert len(flushes) >= 9
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def violations(
    log: list[Op], top: Path, check: Callable[[Path, list[str]], None], scratch: Path, *, after: int = 0
) -> Iterator[str]:
    for number, (marks, found) in enumerate(crash_states(log, top, after=after, random_states=8)):
        place = scratch / str(number)
        build(found, place)
        try:
            check(place, marks)
        except Exception as error:  # noqa: BLE001 - whatever the check raises is its verdict
            yield f"after {marks}: {error!r}"
        finally:
            shutil.rmtree(place)


def test_a_kill_before_any_change_to_the_disk(tmp_path: Path) -> None:
    """The stock reader, too, finds a whole checkpoint, except between the two renames."""
    verbs = []
    for at in count(1):
        path = tmp_path / str(at) / "last"
        save(path, 1, Disk())
        status, verb = _killed(path, at)
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0 and number_at(path) == 2
            break
        assert os.WTERMSIG(status) == signal.SIGKILL
        verbs.append(verb)
        assert number_at(path) in (1, 2)
        if path.exists():
            found = state(0)
            dcp.load(found, checkpoint_id=path)
            assert found["number"] in (1, 2)
        save(path, 3, Disk())
        assert number_at(path) == 3 and os.listdir(path.parent) == ["last"]
        shutil.rmtree(path.parent)
    assert {"make_folder", "create", "write", "flush", "flush_folder", "rename", "remove"} <= set(verbs)


def _killed(path: Path, at: int) -> tuple[int, str]:
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a fork beside threads: the child uses none of them
        child = os.fork()
    if child == 0:
        code = 1
        try:
            save(path, 2, Dies("any", at, writing))
            code = 0
        finally:
            os._exit(code)
    os.close(writing)
    with os.fdopen(reading) as output:
        verb = output.read()
    return os.waitpid(child, 0)[1], verb
