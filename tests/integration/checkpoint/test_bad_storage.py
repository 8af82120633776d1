"""Storage that fails (full, read-only, forbidden, not a folder): the error says what to do, and nothing is lost."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import reprieve
from reprieve.checkpoint.folder import startup
from reprieve.checkpoint.format.manifest import read_manifest
from reprieve.errors import is_permanent
from reprieve.storage.disk import Disk
from tests.powercut.rigs.kernel import mount
from tests.powercut.rigs.loopfs import LoopDisk, why_unavailable
from tests.powercut.rigs.promise import Job, check_promise, check_visible

needs_root = pytest.mark.skipif(why_unavailable() is not None, reason=str(why_unavailable()))
MS_RDONLY, MS_REMOUNT = 1, 32


@pytest.fixture
def small_disk() -> Iterator[Path]:
    with LoopDisk(16 << 20) as disk:
        yield disk.path


def fill(folder: Path, leave: int) -> None:
    """A file that leaves this many bytes free."""
    stat = os.statvfs(folder)
    size = stat.f_bavail * stat.f_frsize - leave
    fd = os.open(folder / "filler", os.O_RDWR | os.O_CREAT)
    os.posix_fallocate(fd, 0, max(size, 4096))
    os.fsync(fd)
    os.close(fd)


@needs_root
@pytest.mark.root
@pytest.mark.parametrize("leave", [0, 20_000, 60_000, 120_000, 170_000, 180_000, 190_000, 200_000, 210_000, 260_000])
@pytest.mark.parametrize("background", [False, True])
def test_a_full_disk(small_disk: Path, leave: int, background: bool) -> None:
    root, job = small_disk / "checkpoints", Job()
    with job.checkpointer(root) as checkpointer:
        checkpointer.warm_up(wait=True)
        checkpointer.save(job.at(1).extra["seen"])
        fill(small_disk, leave)
        try:
            checkpointer.save(job.at(2).extra["seen"], background=background).wait()
        except reprieve.StorageFull as error:
            assert str(root) in str(error) and "needed" in str(error) and "free" in str(error)
            with contextlib.suppress(reprieve.StorageFull):  # what failed in the background is also raised here
                checkpointer.wait()
            assert sorted(os.listdir(root)) == [".reprieve", "checkpoint-1"], "the partial one is gone"
            assert check_visible(root, 1) == 1
        else:
            assert leave >= 170_000, "a state of 168 kB cannot fit"
            assert check_visible(root, 2) == 2
        (small_disk / "filler").unlink()
        checkpointer.save(job.at(3).extra["seen"])  # training goes on, and so do saves
    assert check_promise(root, 3) == 3


class FailsAt(Disk):
    """The n-th change to the disk fails."""

    def __init__(self, code: int) -> None:
        self.code = code
        self.left: int | None = None
        self.cannot_exchange = False

    def exchange(self, first: Path, second: Path) -> bool:
        return not self.cannot_exchange and super().exchange(first, second)

    def __getattribute__(self, name: str) -> Any:
        if name in (
            "make_folder",
            "create",
            "write",
            "truncate",
            "flush",
            "flush_folder",
            "rename",
            "exchange",
            "remove",
        ):
            if self.left == 0:
                raise OSError(self.code, os.strerror(self.code))
            if self.left is not None:
                self.left -= 1
        return super().__getattribute__(name)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS])
def test_an_error_at_any_change_to_the_disk(code: int, tmp_path: Path) -> None:
    root, job, disk = tmp_path / "checkpoints", Job(), FailsAt(code)
    failures = 0
    with job.checkpointer(root, disk=disk, keep=None) as checkpointer:
        checkpointer.save(job.at(1).extra["seen"])
        step = 1
        for at in range(100):
            step += 1
            disk.left = at
            try:
                checkpointer.save(job.at(step).extra["seen"])
            except reprieve.StorageError as error:
                failures += 1
                assert isinstance(error, reprieve.StorageFull) == (code in (errno.ENOSPC, errno.EDQUOT))
                assert str(root) in str(error)
            else:
                break
            finally:
                disk.left = None
            assert check_visible(root, 1) in (step - 1, step)
            # The name became visible before its flush failed: that one is whole, and may stay.
            step = check_visible(root, 1)
    assert failures > 10
    assert check_promise(root, step) == step


@pytest.mark.parametrize("exchange", [True, False])
def test_an_error_at_any_change_to_the_disk_when_a_checkpoint_is_replaced(exchange: bool, tmp_path: Path) -> None:
    root, job, disk = tmp_path / "checkpoints", Job(), FailsAt(errno.EIO)
    disk.cannot_exchange = not exchange
    with job.at(1).checkpointer(root, disk=disk) as checkpointer:
        checkpointer.save(1, metrics={"save": 1})
        for at in range(100):
            disk.left = at
            try:
                checkpointer.save(1, metrics={"save": 2}, replace=True)
                break
            except reprieve.StorageError:
                disk.left = None
                if not exchange:
                    startup.clean_up(disk, root)  # as the next start does
                assert check_visible(root, 1) == 1
        assert read_manifest(root / "checkpoint-1").metrics == {"save": 2}
    assert check_promise(root, 1) == 1


@needs_root
@pytest.mark.root
def test_a_read_only_disk(small_disk: Path) -> None:
    root, job = small_disk / "checkpoints", Job()
    with job.checkpointer(root) as checkpointer:
        checkpointer.save(job.at(1).extra["seen"])
    mount("none", small_disk, "ext4", MS_REMOUNT | MS_RDONLY, "")
    for folder in (root, small_disk / "others"):
        with pytest.raises(reprieve.StorageError, match=f"{folder}.*read-only"):
            Job().checkpointer(folder)
    mount("none", small_disk, "ext4", MS_REMOUNT, "")
    assert check_promise(root, 1) == 1


def test_a_file_where_the_folder_should_be(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("not a folder")
    with pytest.raises(reprieve.FolderNotWritable, match=r"checkpoints.*file where the folder should be"):
        Job().checkpointer(tmp_path / "checkpoints")
    with pytest.raises(reprieve.FolderNotWritable, match="file where the folder should be"):
        Job().checkpointer(tmp_path / "checkpoints" / "deeper")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_a_folder_without_permission(tmp_path: Path) -> None:
    folder = tmp_path / "locked"
    folder.mkdir(mode=0o555)
    for parent in (tmp_path, *tmp_path.parents):
        if parent.name.startswith("pytest"):
            parent.chmod(0o755)
    job = Job()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setegid(65534)
            os.seteuid(65534)
            job.checkpointer(folder / "checkpoints")
        except reprieve.StorageError as error:
            os.write(writing, f"{is_permanent(error)} {error}".encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as output:
        text = output.read()
    os.waitpid(child, 0)
    assert text.startswith(
        f"True cannot use {folder}/checkpoints for checkpoints: no permission for uid 65534, gid 65534"
    )
    assert "fsGroup" in text
