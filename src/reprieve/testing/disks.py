"""Disks that are slow, or full, where the machine's own is neither."""

from __future__ import annotations

import errno
import os
import threading
import time
from pathlib import Path

from reprieve.storage.disk import Disk, OpenFile


class SlowDisk(Disk):
    """Writes take as long as they would at so many bytes a second, all threads together."""

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
    """No room (ENOSPC) after so many bytes, counted by what is reserved or, in files without a reservation, written."""

    def __init__(self, after_bytes: int) -> None:
        self.left_bytes = after_bytes
        self._lock = threading.Lock()
        self._reserved: dict[Path, int] = {}

    def create(self, path: Path, size: int) -> OpenFile:
        self._take(path, size)
        file = super().create(path, size)
        with self._lock:
            self._reserved[path] = size
        return file

    def write(self, file: OpenFile, data: memoryview, offset: int) -> None:
        with self._lock:
            reserved = self._reserved.get(file.path, 0)
        # Direct I/O writes whole pages: what goes beyond the reserved size by less than one was reserved with it.
        self._take(file.path, 0 if reserved else data.nbytes)
        super().write(file, data, offset)

    def remove(self, path: Path) -> None:
        super().remove(path)
        with self._lock:
            self.left_bytes += self._reserved.pop(path, 0)

    def _take(self, path: Path, count: int) -> None:
        with self._lock:
            if count > self.left_bytes:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
            self.left_bytes -= count
