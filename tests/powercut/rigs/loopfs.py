"""LoopDisk: a small ext4 whose power can be cut, for tests of what remains after the remount.

cut() stops the file system at once and writes nothing more, not even the journal: what was only in the page cache or
in an uncommitted transaction is gone. It keeps every write that reached the device, flushed or not, in order; a
missing flush is found only by the recorder (recorder.py, replay.py).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
import tempfile
import time
from pathlib import Path

from tests.powercut.rigs.kernel import (
    MIB,
    MNT_DETACH,
    Guard,
    copy_image,
    format_ext4,
    mount_ext4,
    new_image,
    umount,
    why_unavailable,
)

__all__ = ["LoopDisk", "why_unavailable"]

FS_IOC_SHUTDOWN = 0x8004587D
SHUTDOWN_NOLOGFLUSH = 2
BUSY_WAIT_S = 0.2


class LoopDisk:
    """An ext4 image on a loop device, mounted at `path`. `with LoopDisk() as disk:` mounts and cleans up."""

    def __init__(self, size_bytes: int = 64 * MIB, *, image_fd: int | None = None) -> None:
        """Takes over `image_fd` if given, otherwise formats a new image."""
        if image_fd is None:
            image_fd = new_image(size_bytes)
            format_ext4(image_fd)
        self._image = image_fd
        self._still_used = False
        self._mounted = False
        self._closed = False
        self.power_is_on = True
        """False from just before a cut begins: what a process reports later would never have left a real machine."""
        self.path = Path(tempfile.mkdtemp(prefix="powercut-")) / "mnt"
        self.path.mkdir()
        self._guard = Guard(self.path)

    def mount(self) -> None:
        if self._still_used:
            # The old mount lives on in processes that hold it: give the new one bytes of its own.
            self.insert(copy_image(self._image))
        mount_ext4(self._image, self.path)
        self._mounted = self.power_is_on = True

    def cut(self) -> None:
        """Cut the power. Open files stay open and give EIO; call remount() to see what is left.

        A call that is in the kernel at this moment may still return without an error: a flush that has looked before
        the cut whether the file system is up finds its transaction gone, and takes it for written (jbd2).
        """
        self.power_is_on = False
        root = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.ioctl(root, FS_IOC_SHUTDOWN, struct.pack("=I", SHUTDOWN_NOLOGFLUSH))
        finally:
            os.close(root)

    def unmount(self) -> None:
        """Unmount; lazily if a process still has files open after a moment."""
        if self._mounted:
            self._mounted = False
            self._still_used = not unmount_soon(self.path)

    def remount(self) -> None:
        self.unmount()
        self.mount()

    def insert(self, image_fd: int) -> None:
        """Put another image in the place of the present one; only while unmounted."""
        assert not self._mounted
        os.close(self._image)
        self._image = image_fd
        self._still_used = False

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            with contextlib.suppress(OSError):
                self.unmount()
            self._guard.fire()
            os.close(self._image)

    def __enter__(self) -> LoopDisk:
        try:
            self.mount()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def unmount_soon(path: Path) -> bool:
    """True if the mount is gone; False if it is detached and ends with its last user."""
    deadline = time.monotonic() + BUSY_WAIT_S
    while True:
        try:
            umount(path)
            return True
        except OSError as error:
            if error.errno != errno.EBUSY:
                raise
        if time.monotonic() > deadline:
            umount(path, MNT_DETACH)
            return False
        time.sleep(0.005)
