"""The recorder's server process: one file over /dev/fuse, without libfuse, that logs all that is done to it.

Started by recorder.py as `fuse_server.py FUSE_FD IMAGE_FD LOG_FD MARK_FD`. Ends when the file is unmounted. It is a
process of its own because one that does I/O on the mount would wait for itself. Requests are served one by one, so
the log's order is the order in which the kernel had its answers. The formats are those of include/uapi/linux/fuse.h.
"""

from __future__ import annotations

import errno
import mmap
import os
import select
import signal
import stat
import struct
import sys
from collections.abc import Callable

GETATTR, SETATTR, OPEN, READ, WRITE, RELEASE, FSYNC, FLUSH, INIT, DESTROY = 3, 4, 14, 15, 16, 18, 20, 25, 26, 38
NO_ANSWER = (2, 36, 42)  # FORGET, INTERRUPT, BATCH_FORGET
FOPEN_DIRECT_IO = 1
BIG_WRITES, ASYNC_DIO = 1 << 5, 1 << 15
MAX_WRITE = 128 << 10  # the protocol's limit of 32 pages where FUSE_MAX_PAGES is not agreed on

IN_HEADER = struct.Struct("=IIQQIIIHH")
OUT_HEADER = struct.Struct("=IiQ")
INIT_OUT = struct.Struct("=IIIIHHII32x")
ATTR_OUT = struct.Struct("=QII 6Q 10I")
OPEN_OUT = struct.Struct("=QII")
READ_WRITE_IN = struct.Struct("=QQIIQII")
WRITE_OUT = struct.Struct("=II")

LOG_HEADER = struct.Struct("=cQI")  # kind (W, F or M), offset, length; then that many bytes


class Server:
    def __init__(self, fuse: int, image: int, log: int, marks: int) -> None:
        self.fuse, self.log, self.marks = fuse, log, marks
        self.size = os.fstat(image).st_size
        self.image = mmap.mmap(image, self.size)
        self.answers: dict[int, Callable[[memoryview], bytes]] = {
            INIT: self.init,
            GETATTR: self.attributes,
            SETATTR: self.attributes,  # only timestamps are ever set
            OPEN: lambda _: OPEN_OUT.pack(0, FOPEN_DIRECT_IO, 0),
            READ: self.read,
            WRITE: self.write,
            FSYNC: self.fsync,
            FLUSH: lambda _: b"",
            RELEASE: lambda _: b"",
            DESTROY: lambda _: b"",
        }

    def run(self) -> None:
        # A request can be taken back between the poll and the read: a read that waited then would leave marks unserved.
        os.set_blocking(self.fuse, False)
        poll = select.poll()
        poll.register(self.fuse, select.POLLIN)
        poll.register(self.marks, select.POLLIN)
        request = bytearray(MAX_WRITE + 4096)
        while True:
            for fd, events in poll.poll():
                if fd == self.fuse:
                    try:
                        length = os.readv(self.fuse, [request])
                    except OSError as error:
                        if error.errno == errno.ENODEV:  # unmounted
                            return
                        if error.errno in (errno.EINTR, errno.EAGAIN, errno.ENOENT):  # taken back by the kernel
                            continue
                        raise
                    self.serve(memoryview(request)[:length])
                elif events & select.POLLIN and (text := os.read(self.marks, 4096)):
                    self.append(b"M", 0, text)
                    os.write(self.marks, b".")
                else:  # nobody can mark any more, but the mount has to be served to its end
                    poll.unregister(self.marks)

    def serve(self, request: memoryview) -> None:
        _, opcode, unique, *_ = IN_HEADER.unpack_from(request)
        if opcode in NO_ANSWER:
            return
        answer, body = self.answers.get(opcode), b""
        if answer is not None:
            body = answer(request[IN_HEADER.size :])
        # ENOSYS for the rest (xattrs, fallocate): the kernel does without and does not ask again.
        head = OUT_HEADER.pack(OUT_HEADER.size + len(body), 0 if answer else -errno.ENOSYS, unique)
        os.writev(self.fuse, [head, body])

    def append(self, kind: bytes, offset: int, data: bytes | memoryview) -> None:
        os.writev(self.log, [LOG_HEADER.pack(kind, offset, len(data)), data])

    def init(self, body: memoryview) -> bytes:
        major, minor, readahead, offered = struct.unpack_from("=IIII", body)
        flags = offered & (BIG_WRITES | ASYNC_DIO)
        return INIT_OUT.pack(major, min(minor, 31), readahead, flags, 64, 48, MAX_WRITE, 1)

    def attributes(self, _: memoryview) -> bytes:
        times = (0, 0, 0, 0, 0, 0)
        mode_and_owner = (stat.S_IFREG | 0o600, 1, 0, 0)
        return ATTR_OUT.pack(3600, 0, 0, 1, self.size, self.size // 512, *times, *mode_and_owner, 0, 4096, 0)

    def read(self, body: memoryview) -> bytes:
        _, offset, size, *_ = READ_WRITE_IN.unpack_from(body)
        return self.image[offset : offset + size]

    def write(self, body: memoryview) -> bytes:
        _, offset, size, *_ = READ_WRITE_IN.unpack_from(body)
        data = body[READ_WRITE_IN.size :][:size]
        self.image[offset : offset + size] = data
        self.append(b"W", offset, data)
        return WRITE_OUT.pack(size, 0)

    def fsync(self, _: memoryview) -> bytes:
        self.append(b"F", 0, b"")
        return b""


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Server(*map(int, sys.argv[1:])).run()
