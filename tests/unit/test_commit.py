"""A save that is discarded is gone, also while other ranks have not heard of it."""

from __future__ import annotations

import errno
from pathlib import Path

from reprieve.checkpoint import commit
from reprieve.storage.disk import Disk


class AnotherRankMakesFiles(Disk):
    """A file more each time that the folder is about to be empty, so many times."""

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
