"""Disks that are slow or full, for machines whose own disk is neither."""

from __future__ import annotations

import errno
import os
import threading
import time
from pathlib import Path

from reprieve.storage.disk import PAGE, Disk, OpenFile


class SlowDisk(Disk):
    """A disk that writes so many bytes a second, for all threads together."""

    def __init__(self, bytes_per_second: int) -> None:
        self.bytes_per_second = bytes_per_second
        self._lock = threading.Lock()
        self._free_at = 0.0

    def write(self, file: OpenFile, data: memoryview, offset: int) -> None:
        with self._lock:
            self._free_at = max(self._free_at, time.monotonic()) + data.nbytes / self.bytes_per_second
            free_at = self._free_at
        super().write(file, data, offset)
        time.sleep(max(0.0, free_at - time.monotonic()))


class FullDisk(Disk):
    """A disk that is full (ENOSPC) after so many bytes. It counts the bytes that files reserve or, without a
    reservation, hold. Removed files make room again."""

    def __init__(self, after_bytes: int) -> None:
        self.left_bytes = after_bytes
        self._lock = threading.Lock()
        self._taken: dict[tuple[int, int], int] = {}
        """Bytes by inode, since names change."""

    def create(self, path: Path, size: int) -> OpenFile:
        with self._lock:
            if size > self.left_bytes:
                raise _full(path)
        file = super().create(path, size)
        self._take(file, size)
        return file

    def write(self, file: OpenFile, data: memoryview, offset: int) -> None:
        # Direct I/O writes whole pages: the last one may exceed the reserved size, and is truncated later.
        self._take(file, offset + data.nbytes, slack=PAGE)
        super().write(file, data, offset)

    def remove(self, path: Path) -> None:
        inode = _inode(os.lstat(path))
        super().remove(path)
        with self._lock:
            self.left_bytes += self._taken.pop(inode, 0)

    def _take(self, file: OpenFile, size: int, *, slack: int = 0) -> None:
        """Count a file as having at least this size."""
        inode = _inode(os.fstat(file.fd))
        with self._lock:
            taken = self._taken.get(inode, 0)
            if size <= taken + (slack if taken else 0):
                return
            if size - taken > self.left_bytes:
                raise _full(file.path)
            self.left_bytes -= size - taken
            self._taken[inode] = size


def _inode(stat: os.stat_result) -> tuple[int, int]:
    return stat.st_dev, stat.st_ino


def _full(path: Path) -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
