"""The kernel calls of the rigs: mount(2), loop devices, ext4 images in memory, and a clean-up that outlives the test.

Called through ctypes and ioctl rather than mount(8) and losetup(8), because a rig mounts thousands of times.
Images are memfds: nothing to delete after a crash, and no disk of the machine is worn.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import shutil
import stat
import struct
import subprocess
from pathlib import Path

MNT_DETACH = 2
MS_NOSUID, MS_NODEV, MS_NOATIME = 2, 4, 1024
CAP_SYS_ADMIN = 21

# include/uapi/linux/loop.h
LOOP_CTL_GET_FREE = 0x4C82
LOOP_CONFIGURE = 0x4C0A
LOOP_GET_STATUS64 = 0x4C05
LO_FLAGS_AUTOCLEAR = 4
LOOP_CONFIG = struct.Struct("=II 5Q 4I 64s64s32s 2Q 64x")
LOOP_STATUS = struct.Struct("=2Q 216x")

MIB = 1 << 20
SBIN = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin", "/usr/bin", "/bin"])

# use_errno: errno is read after the call without a race against other threads' calls.
_libc = ctypes.CDLL(None, use_errno=True)


def why_unavailable() -> str | None:
    """The reason why no loop disk can be mounted here, for a pytest skip; None if it can."""
    if not Path("/dev/loop-control").exists():
        return "no /dev/loop-control"
    caps = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("CapEff"))
    if not int(caps.split()[1], 16) >> CAP_SYS_ADMIN & 1:
        return "mounting needs CAP_SYS_ADMIN (root)"
    if shutil.which("mkfs.ext4", path=SBIN) is None:
        return "no mkfs.ext4 (package e2fsprogs)"
    return None


def mount(source: str, target: Path, fstype: str, flags: int, options: str) -> None:
    args = (source.encode(), os.fsencode(target), fstype.encode(), ctypes.c_ulong(flags), options.encode())
    if _libc.mount(*args) != 0:
        raise OSError(ctypes.get_errno(), f"mount {fstype} from {source}", str(target))


def umount(target: Path, flags: int = 0) -> None:
    if _libc.umount2(os.fsencode(target), flags) != 0:
        raise OSError(ctypes.get_errno(), "umount", str(target))


def attach_loop(backing_fd: int) -> tuple[int, str]:
    """A loop device over the file, as (open fd, path). It detaches itself when its last user is gone."""
    info = (0, 0, 0, 0, 0, 0, 0, 0, LO_FLAGS_AUTOCLEAR, b"powercut", b"", b"", 0, 0)
    config = LOOP_CONFIG.pack(backing_fd, 0, *info)
    control = os.open("/dev/loop-control", os.O_RDWR | os.O_CLOEXEC)
    try:
        for _ in range(1000):
            number = fcntl.ioctl(control, LOOP_CTL_GET_FREE)
            path = f"/dev/loop{number}"
            if not os.path.exists(path):  # a container's /dev does not follow the kernel's
                os.mknod(path, stat.S_IFBLK | 0o600, os.makedev(7, number))
            loop = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.ioctl(loop, LOOP_CONFIGURE, config)
                return loop, path
            except OSError as error:
                os.close(loop)
                if error.errno != errno.EBUSY:  # busy: another process was faster to take the free one
                    raise
    finally:
        os.close(control)
    raise OSError(errno.EBUSY, "no free loop device after 1000 tries")


def is_attached(device: str, backing_fd: int) -> bool:
    """Whether the file is still behind this loop device, which may already be another rig's."""
    backing = os.fstat(backing_fd)
    try:
        loop = os.open(device, os.O_RDONLY | os.O_CLOEXEC)
        try:
            status = fcntl.ioctl(loop, LOOP_GET_STATUS64, bytes(LOOP_STATUS.size))
        finally:
            os.close(loop)
    except OSError as error:
        if error.errno != errno.ENXIO:  # there is no file behind it, or no longer
            raise
        return False
    return LOOP_STATUS.unpack(status) == (backing.st_dev, backing.st_ino)


def sync_file_system(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        if _libc.syncfs(fd) != 0:
            raise OSError(ctypes.get_errno(), "syncfs", str(path))
    finally:
        os.close(fd)


def mount_ext4(image_fd: int, target: Path, options: str = "errors=remount-ro") -> str:
    """Mount the image, and return its loop device. This replays the journal, if there is anything in it."""
    loop, device = attach_loop(image_fd)
    try:
        mount(device, target, "ext4", MS_NOSUID | MS_NODEV | MS_NOATIME, options)
        return device
    finally:
        os.close(loop)  # the mount holds the device now; without a mount, it detaches here


def new_image(size_bytes: int) -> int:
    """An empty image as the fd of a memfd."""
    fd = os.memfd_create("powercut")
    os.truncate(fd, size_bytes)
    return fd


def format_ext4(image_fd: int) -> None:
    """mkfs.ext4 with a journal and checksums as usual, but small: fewer blocks to write, replay and copy."""
    command = [
        *("mkfs.ext4", "-q", "-F", "-b", "4096", "-m", "0", "-N", "1024", "-J", "size=4"),
        # Without lazy_itable_init=0 a kernel thread goes on writing after the mount.
        *("-E", "nodiscard,lazy_itable_init=0", "-O", "^resize_inode", f"/proc/self/fd/{image_fd}"),
    ]
    made = subprocess.run(command, pass_fds=[image_fd], env={"PATH": SBIN}, capture_output=True, text=True)
    if made.returncode != 0:
        raise RuntimeError(f"mkfs.ext4 failed: {made.stderr}")


def copy_image(image_fd: int) -> int:
    """A copy that shares nothing with the original; holes stay holes."""
    size, at = os.fstat(image_fd).st_size, 0
    copy = new_image(size)
    while at < size:
        try:
            at = os.lseek(image_fd, at, os.SEEK_DATA)
        except OSError:  # ENXIO: only a hole is left
            break
        end = os.lseek(image_fd, at, os.SEEK_HOLE)
        while at < end:
            at += os.pwrite(copy, os.pread(image_fd, min(end - at, MIB), at), at)
    return copy


class Guard:
    """A shell that waits for the end of this process, however it ends, and then takes the mounts down."""

    SCRIPT = 'read -r _; for m; do umount -l "$m"; rmdir "$m" || rm -f "$m"; done; rmdir "$(dirname "$1")"'

    def __init__(self, *mounts: Path) -> None:
        # Its own session, so that Ctrl-C in the terminal does not end it first.
        self._shell = subprocess.Popen(
            ["/bin/sh", "-c", self.SCRIPT, "guard", *map(str, mounts)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={"PATH": SBIN},
            cwd="/",
            start_new_session=True,
        )

    def fire(self) -> None:
        """Clean up now. A line ends the wait and not EOF, because a forked child may still hold the pipe."""
        self._shell.communicate(b"\n")
