"""A sealed folder is flushed, and a discarded save is removed, even if other ranks do not know of it yet."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from reprieve import Checkpointer, StorageFull
from reprieve.checkpoint.folder import commit
from reprieve.storage.disk import Disk, OpenFile
from tests.support.helpers import entry_of, manifest, small_model


class AnotherRankMakesFiles(Disk):
    """Adds one more file each time that the folder is about to be empty, a given number of times."""

    def __init__(self, times: int) -> None:
        self._left = times

    def remove_folder(self, path: Path) -> None:
        if self._left:
            self._left -= 1
            (path / f"model-{self._left}.safetensors").touch()
        super().remove_folder(path)


class Refuses(Disk):
    tries = 0

    def remove_folder(self, path: Path) -> None:
        self.tries += 1
        raise OSError(errno.EIO, "the disk", str(path))


def test_files_that_other_ranks_still_make_go_too(tmp_path: Path) -> None:
    folder = tmp_path / ".checkpoint-2.saving-1"
    commit.begin(Disk(), folder)
    commit.discard(AnotherRankMakesFiles(3), folder)
    assert not folder.exists()


def test_an_error_is_left_to_the_next_start(tmp_path: Path) -> None:
    folder, disk = tmp_path / ".checkpoint-2.saving-1", Refuses()
    commit.begin(Disk(), folder)
    commit.discard(disk, folder)
    assert folder.exists() and disk.tries == 1


class Flushes(Disk):
    def __init__(self) -> None:
        self.flushed: list[Path] = []

    def flush_folder(self, path: Path) -> None:
        self.flushed.append(path)
        super().flush_folder(path)


def test_each_folder_is_flushed_and_the_inner_ones_first(tmp_path: Path) -> None:
    folder, disk = tmp_path / ".checkpoint-1.saving-1", Flushes()
    commit.begin(disk, folder)
    inner = folder / "inner" / "more"
    inner.mkdir(parents=True)
    for path in (folder / "a.bin", folder / "inner" / "b.bin", inner / "c.bin"):
        path.write_bytes(b"x")
    files = {name: entry_of(folder / name) for name in ("a.bin", "inner/b.bin", "inner/more/c.bin")}
    commit.seal(disk, folder, manifest(files=files))
    assert disk.flushed == [inner, inner.parent, folder]


class RoomForOne(Disk):
    """Opening the second file of a save, after the sentinel, fails."""

    def create(self, path: Path, size: int) -> OpenFile:
        if ".saving" in path.parent.name and len(list(path.parent.iterdir())) == 2:
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT), str(path))
        return super().create(path, size)


def test_a_save_that_cannot_begin_leaves_no_file_open(tmp_path: Path) -> None:
    """A file without a name takes space until it is closed."""
    with Checkpointer(tmp_path, model=small_model(), disk=RoomForOne()) as checkpointer:
        before = len(os.listdir("/proc/self/fd"))
        with pytest.raises(StorageFull):
            checkpointer.save(1)
        assert len(os.listdir("/proc/self/fd")) == before
