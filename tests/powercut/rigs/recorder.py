"""Recorder: an ext4 on a disk that records every write and flush in order, with marks from the test in between.

    ext4 → loop device → disk.img, a file over FUSE (fuse_server.py) → log

The file is opened for direct I/O, so the loop device's writes reach the server at once and a flush of the disk is an
FSYNC there. replay.py makes crash states out of the log.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.powercut.rigs.fuse_server import LOG_HEADER
from tests.powercut.rigs.kernel import MIB, MS_NODEV, MS_NOSUID, Guard, format_ext4, mount, mount_ext4, new_image
from tests.powercut.rigs.kernel import why_unavailable as why_no_loop
from tests.powercut.rigs.loopfs import unmount_soon

MARK_WAIT_S = 60


@dataclass(frozen=True)
class Write:
    offset: int
    data: bytes


@dataclass(frozen=True)
class Flush:
    """All writes before it are on the medium when it returns."""


@dataclass(frozen=True)
class Mark:
    text: str


Entry = Write | Flush | Mark


def why_unavailable() -> str | None:
    return why_no_loop() or (None if Path("/dev/fuse").exists() else "no /dev/fuse")


class Recorder:
    """`with Recorder() as recorder:` work below recorder.path, call mark(), then `log = recorder.stop()`.

    `base` is the freshly made file system's image, on which the log is to be replayed.
    """

    def __init__(self, size_bytes: int = 32 * MIB) -> None:
        self._image = new_image(size_bytes)
        format_ext4(self._image)
        self.base = os.pread(self._image, size_bytes, 0)
        self._log = os.memfd_create("powercut-log")
        folder = Path(tempfile.mkdtemp(prefix="powercut-"))
        self.path, self._file = folder / "mnt", folder / "disk.img"
        self.path.mkdir()
        self._file.touch()
        self._guard = Guard(self.path, self._file)
        self._server: subprocess.Popen[bytes] | None = None
        self._entries: list[Entry] | None = None
        self._marks: socket.socket | None = None

    def start(self) -> None:
        self._start_server()
        # LO_FLAGS_DIRECT_IO makes no difference (tried on 6.18): FOPEN_DIRECT_IO leaves no page cache to go round.
        backing = os.open(self._file, os.O_RDWR | os.O_CLOEXEC)
        try:
            mount_ext4(backing, self.path)
        finally:
            os.close(backing)

    def _start_server(self) -> None:
        self._marks, child_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        fuse = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
        try:
            # rootmode is octal: the root of this file system is a plain file, mounted over a plain file.
            options = f"fd={fuse},rootmode=100600,user_id=0,group_id=0"
            mount("recorder", self._file, "fuse", MS_NOSUID | MS_NODEV, options)
            fds = [fuse, self._image, self._log, child_end.fileno()]
            self._server = subprocess.Popen(
                [sys.executable, "-IS", str(Path(__file__).with_name("fuse_server.py")), *map(str, fds)],
                pass_fds=fds,
                start_new_session=True,
                stdin=subprocess.DEVNULL,
            )
        finally:
            os.close(fuse)  # with the server's copy alone left, its death ends the mount instead of hanging it
            child_end.close()

    def mark(self, text: str) -> None:
        """Put a mark in the log, after all that has reached the disk so far. One caller at a time."""
        assert self._marks is not None, "not started"
        self._marks.settimeout(MARK_WAIT_S)
        self._marks.send(text.encode())
        if not self._marks.recv(1):
            raise RuntimeError("the recorder's server has died")

    def stop(self) -> list[Entry]:
        """The log up to now, without what the unmount writes after it."""
        if self._entries is None:
            size = os.fstat(self._log).st_size
            self.close()
            self._entries = list(read_log(self._log, size))
            os.close(self._log)
        return self._entries

    def close(self) -> None:
        if self._marks is None:
            return
        for path in (self.path, self._file):
            with contextlib.suppress(OSError):
                unmount_soon(path)
        self._guard.fire()
        self._marks.close()
        self._marks = None
        if self._server is not None:
            try:
                self._server.wait(timeout=5)
            except subprocess.TimeoutExpired:  # someone still holds files on the mount: end it under them
                self._server.kill()
                self._server.wait()
        os.close(self._image)

    def __enter__(self) -> Recorder:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_log(fd: int, size: int) -> Iterator[Entry]:
    at = 0
    while at < size:
        kind, offset, length = LOG_HEADER.unpack(os.pread(fd, LOG_HEADER.size, at))
        data = os.pread(fd, length, at + LOG_HEADER.size)
        at += LOG_HEADER.size + length
        if kind == b"W":
            yield Write(offset, data)
        elif kind == b"F":
            yield Flush()
        else:
            yield Mark(data.decode())
