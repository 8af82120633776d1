"""The only module that changes the durable content of a checkpoint.

Every verb here is one system call that matters after a power cut. No other module creates, writes, flushes, renames or
removes a file of a checkpoint; logs, run records, scratch files and stores are written elsewhere. So a test can replace
the whole disk (fill it, kill the process at the n-th call, record the calls and replay every crash), and the callers
alone show the order of the flushes.

`Disk` uses direct I/O where the file system supports it (measured: 2 to 5 times the speed of buffered writes plus
fsync). Where it does not (tmpfs, some NFS and FUSE mounts), the same verbs write through the page cache.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import math
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from reprieve.errors import StorageError, StorageFull
from reprieve.units import format_size

PAGE = 4096
"""Every file system that supports direct I/O accepts it in units of this size."""

_libc = ctypes.CDLL(None, use_errno=True)
_STATX_DIOALIGN = 0x2000
_AT_EMPTY_PATH = 0x1000
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)

DAMAGE = frozenset(
    {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EIO, errno.EUCLEAN, errno.EBADMSG, errno.ENODATA}
)
"""Errors of a read which mean that the stored data is damaged or missing. Any other error may be temporary (no file
descriptor, no permission, a server that does not answer) and says nothing about the data."""


@dataclass(slots=True)
class OpenFile:
    """A file that is open for reading or writing."""

    path: Path
    fd: int
    direct: bool
    """Whether it uses direct I/O: offsets and lengths must be multiples of PAGE, and buffers page-aligned."""


class Disk:
    """The verbs that change a local or mounted file system."""

    def make_folder(self, path: Path) -> None:
        path.mkdir()

    def create(self, path: Path, size: int) -> OpenFile:
        """Create a file and reserve `size` bytes, so that a full disk fails here, before the first write."""
        file = _open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        try:
            if size and _libc.fallocate(file.fd, 0, ctypes.c_long(0), ctypes.c_long(_round_up(size))):
                code = ctypes.get_errno()
                if code in _NO_ROOM:
                    raise OSError(code, os.strerror(code), str(path))
        except BaseException:
            os.close(file.fd)
            raise
        return file

    def open(self, path: Path) -> OpenFile:
        """Open a file that another rank created, to write a part of it."""
        return _open(path, os.O_RDWR)

    def write(self, file: OpenFile, data: memoryview, offset: int) -> None:
        """Write all of `data`. If the file is direct, it must be page-aligned and a whole number of pages."""
        while data:
            try:
                done = os.pwrite(file.fd, data, offset)
            except OSError as error:
                # Some file systems accept O_DIRECT in open and refuse the first write.
                if error.errno != errno.EINVAL or not file.direct:
                    raise
                _switch_to_buffered(file)
                continue
            data = data[done:]
            offset += done
            if data and file.direct and done % PAGE:
                _switch_to_buffered(file)

    def truncate(self, file: OpenFile, size: int) -> None:
        os.ftruncate(file.fd, size)

    def flush(self, file: OpenFile) -> None:
        """Make the file's bytes and size durable."""
        os.fdatasync(file.fd)

    def flush_folder(self, path: Path) -> None:
        """Make the folder's entries durable: names that were created, renamed or removed."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def rename(self, source: Path, target: Path) -> None:
        source.rename(target)

    def exchange(self, first: Path, second: Path) -> bool:
        """Swap two names atomically. Return False where the kernel or the file system (NFS) cannot."""
        renameat2 = getattr(_libc, "renameat2", None)  # missing in some libcs
        if renameat2 is None:
            return False
        if not renameat2(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE):
            return True
        code = ctypes.get_errno()
        if code in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
            return False
        raise OSError(code, os.strerror(code), str(first), None, str(second))

    def remove(self, path: Path) -> None:
        path.unlink()

    def remove_folder(self, path: Path) -> None:
        path.rmdir()

    def touch(self, path: Path) -> None:
        """Set the modification time to now: a heartbeat, not data."""
        os.utime(path)

    # The methods below are made of the verbs above.

    def close(self, file: OpenFile) -> None:
        os.close(file.fd)

    def remove_tree(self, path: Path) -> None:
        """Remove `path` and everything below it, if it exists. Links are removed, not followed."""
        with contextlib.suppress(FileNotFoundError):
            if path.is_symlink() or not path.is_dir():
                self.remove(path)
                return
            for child in list(path.iterdir()):
                self.remove_tree(child)
            self.remove_folder(path)

    def write_file(self, path: Path, data: bytes, *, flush: bool = True) -> None:
        """Create a small file. Its name is durable only once the folder is flushed."""
        file = self.create(path, 0)
        try:
            _switch_to_buffered(file)
            self.write(file, memoryview(data), 0)
            if flush:
                self.flush(file)
        finally:
            self.close(file)

    def replace_file(self, path: Path, data: bytes, *, flush_folder: bool = True) -> None:
        """Replace a small file atomically: after a crash it holds either the old bytes or the new ones."""
        new = path.with_name(f"{path.name}.new")
        with contextlib.suppress(FileNotFoundError):
            self.remove(new)
        self.write_file(new, data)
        self.rename(new, path)
        if flush_folder:
            self.flush_folder(path.parent)


def open_for_reading(path: Path, *, buffered: bool = False) -> OpenFile:
    """Open a file for reading. `buffered`: through the page cache, which then keeps what was read."""
    if buffered:
        return OpenFile(path, os.open(path, os.O_RDONLY | os.O_CLOEXEC), direct=False)
    return _open(path, os.O_RDONLY)


def read_into(file: OpenFile, buffer: memoryview, offset: int) -> int:
    """Fill `buffer` from `offset` on, up to the end of the file. Return the number of bytes read."""
    total = 0
    while total < len(buffer):
        try:
            done = os.preadv(file.fd, [buffer[total:]], offset + total)
        except OSError as error:
            if error.errno != errno.EINVAL or not file.direct:
                raise
            _switch_to_buffered(file)
            continue
        if done == 0:
            break
        total += done
        # A direct read that ends inside a page has reached the end of the file.
        if file.direct and done % PAGE:
            break
    return total


def read_from_cache(file: OpenFile, buffer: memoryview, offset: int) -> bool:
    """Fill `buffer` from the page cache, without waiting for the disk. Return whether all of it was there."""
    total = 0
    while total < len(buffer):
        try:
            done = os.preadv(file.fd, [buffer[total:]], offset + total, os.RWF_NOWAIT)
        except OSError:  # EAGAIN: not in the cache; others: the file system does not support it
            return False
        if done == 0:
            return False
        total += done
    return True


def free_bytes(folder: Path) -> int:
    """Return the bytes that this user can still write to the file system of `folder`."""
    stat = os.statvfs(folder)
    return stat.f_bavail * stat.f_frsize


def free_files(folder: Path) -> float:
    """Return how many more files fit; infinity if the file system does not limit them."""
    stat = os.statvfs(folder)
    return stat.f_favail if stat.f_files else math.inf


def explain(error: OSError, folder: Path, *, needed: int | None = None) -> NoReturn:
    """Raise a StorageError in place of an OSError: it says what happened to which folder, and what to do."""
    if isinstance(error, StorageError):
        raise error
    if error.errno in _NO_ROOM:
        try:
            free = f"{format_size(free_bytes(folder))} and {free_files(folder):,.0f} inodes"
        except OSError:
            free = "unknown"
        need = f"{format_size(needed)} needed, " if needed is not None else ""
        raise StorageFull(
            error.errno, f"no room for a checkpoint in {folder}: {need}{free} free. Free some space or lower `keep`"
        ) from error
    hint = {
        errno.EROFS: "the file system is mounted read-only",
        errno.EACCES: "no permission",
        errno.EPERM: "no permission",
        errno.ENOTDIR: "there is a file where the folder should be",
        errno.EIO: "the storage reports an I/O error",
    }.get(error.errno or 0, error.strerror or str(error))
    at = f" (at {error.filename})" if error.filename and str(error.filename) != str(folder) else ""
    raise StorageError(error.errno, f"cannot use {folder} for checkpoints: {hint}{at}") from error


def _open(path: Path, flags: int) -> OpenFile:
    flags |= os.O_CLOEXEC
    try:
        fd = os.open(path, flags | os.O_DIRECT, 0o644)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        # tmpfs: the call that failed may have created the file.
        return OpenFile(path, os.open(path, flags & ~os.O_EXCL, 0o644), direct=False)
    file = OpenFile(path, fd, direct=True)
    if not _direct_by_pages(fd):
        _switch_to_buffered(file)
    return file


def _switch_to_buffered(file: OpenFile) -> None:
    import fcntl

    if file.direct:
        fcntl.fcntl(file.fd, fcntl.F_SETFL, fcntl.fcntl(file.fd, fcntl.F_GETFL) & ~os.O_DIRECT)
        file.direct = False


def _direct_by_pages(fd: int) -> bool:
    """Return whether direct I/O works in whole pages. Kernels before 6.1 do not report it: then `write` finds out."""
    result = ctypes.create_string_buffer(256)
    if _libc.statx(fd, b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, result):
        return True
    (mask,) = struct.unpack_from("I", result, 0)
    memory, offset = struct.unpack_from("II", result, 152)
    if not mask & _STATX_DIOALIGN:
        return True
    return bool(0 < memory <= PAGE and 0 < offset <= PAGE)


def _round_up(size: int) -> int:
    return -(-size // PAGE) * PAGE
