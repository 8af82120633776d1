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
    is_attached,
    mount_ext4,
    new_image,
    sync_file_system,
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
        self._device: str | None = None
        """The loop device of the present mount."""
        self._closed = False
        self.power_is_on = True
        """False from just before a cut begins: what a process reports later would never have left a real machine."""
        self.path = Path(tempfile.mkdtemp(prefix="powercut-")) / "mnt"
        self.path.mkdir()
        self._guard = Guard(self.path)

    def mount(self) -> None:
        if self._still_used:
            # The old file system lives on and writes: give the new one bytes of its own.
            self.insert(copy_image(self._image))
        self._device = mount_ext4(self._image, self.path)
        self.power_is_on = True

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
        """Unmount; lazily if a process still has files open after a moment.

        Even where nobody has, the file system may live on: each mount namespace that was made meanwhile (`unshare
        --mount`, a container) has a copy of the mount. When the last of them ends, ext4 writes the metadata that it has
        in memory, also after a cut. On the image of the new mount that would undo what is durable there.
        """
        device, self._device = self._device, None
        if device is not None:
            if self.power_is_on:
                sync_file_system(self.path)
            unmount_soon(self.path)
            self._still_used = not detached_soon(device, self._image)

    def remount(self) -> None:
        self.unmount()
        self.mount()

    def insert(self, image_fd: int) -> None:
        """Put another image in the place of the present one; only while unmounted."""
        assert self._device is None
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


def unmount_soon(path: Path) -> None:
    """Unmount once nobody has files open there; after a moment lazily, so that the mount ends with its last user."""
    deadline = time.monotonic() + BUSY_WAIT_S
    while True:
        try:
            return umount(path)
        except OSError as error:
            if error.errno != errno.EBUSY:
                raise
        if time.monotonic() > deadline:
            return umount(path, MNT_DETACH)
        time.sleep(0.005)


def detached_soon(device: str, image_fd: int) -> bool:
    """True if the file system on the device has ended and let go of the image; False if it is still in use."""
    deadline = time.monotonic() + BUSY_WAIT_S
    while is_attached(device, image_fd):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True
