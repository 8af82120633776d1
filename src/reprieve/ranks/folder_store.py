"""A store in a folder that all ranks see: for jobs without a common TCP port, and for tests without torch.

Each key is a file. `put_once` is `link`, which fails if the name exists, on NFS too. `set` is a rename. `add` holds a
lock (`flock`, which the kernel releases when a process is killed). Nothing is flushed: a store lives no longer than its
job. Each start of a job needs a new folder: otherwise it would take the agreements of an earlier start for its own.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote

from reprieve.errors import StoreLost
from reprieve.ranks.store import ANSWER_LIMIT
from reprieve.ranks.timed_calls import TimedCaller

T = TypeVar("T")

MIN_POLL_INTERVAL_S = 0.002
MAX_POLL_INTERVAL_S = 0.05
"""A wait for a key polls more and more rarely, up to this interval."""
_NAME_BYTES = 200
"""File systems allow 255."""


class FolderStore:
    """Keys as files in one folder, which is created if it does not exist."""

    def __init__(self, folder: str | os.PathLike[str], *, limit: timedelta = ANSWER_LIMIT) -> None:
        self.folder = Path(folder)
        self._limit = limit
        self._caller = TimedCaller(f"store in {folder}")
        self._call(lambda: self.folder.mkdir(parents=True, exist_ok=True))

    def set(self, key: str, value: bytes) -> None:
        def call() -> None:
            with self._new_file(value) as new_file:
                new_file.rename(self._path(key))

        self._call(call)

    def get(self, key: str) -> bytes | None:
        return self._call(lambda: self._read(key))

    def add(self, key: str, amount: int) -> int:
        def call() -> int:
            with self._locked():
                total = int(self._read(key) or 0) + amount
                with self._new_file(str(total).encode()) as new_file:
                    new_file.rename(self._path(key))
                return total

        return self._call(call)

    def put_once(self, key: str, value: bytes) -> bytes:
        def call() -> bytes:
            path = self._path(key)
            with self._new_file(value) as new_file:
                while True:
                    try:
                        os.link(new_file, path)
                        return value
                    except FileExistsError:
                        if (held := self._read(key)) is not None:  # None: deleted in between
                            return held

        return self._call(call)

    def wait(self, key: str, limit: timedelta) -> bytes | None:
        deadline = time.monotonic() + limit.total_seconds()
        interval_s = MIN_POLL_INTERVAL_S
        while (value := self.get(key)) is None and (remaining_s := deadline - time.monotonic()) > 0:
            time.sleep(min(interval_s, remaining_s))
            interval_s = min(interval_s * 1.5, MAX_POLL_INTERVAL_S)
        return value

    def delete(self, key: str) -> None:
        def call() -> None:
            try:
                self._path(key).unlink()
            except FileNotFoundError:
                self._check_folder()

        self._call(call)

    def client(self) -> FolderStore:
        return FolderStore(self.folder, limit=self._limit)

    def close(self) -> None:
        self._caller.close()

    def _call(self, call: Callable[[], T]) -> T:
        try:
            return self._caller.run(call, self._limit)
        except OSError as error:
            raise StoreLost(self._caller.lose(error.strerror or str(error))) from error

    # The methods below run on the thread of the TimedCaller.

    def _path(self, key: str) -> Path:
        name = quote(key, safe=" ,=")
        if len(name) > _NAME_BYTES or name.startswith("."):
            name = f"{name[:100].lstrip('.')}~{hashlib.sha256(key.encode()).hexdigest()}"
        return self.folder / name

    def _read(self, key: str) -> bytes | None:
        try:
            return self._path(key).read_bytes()
        except FileNotFoundError:
            self._check_folder()
            return None

    def _check_folder(self) -> None:
        if not self.folder.is_dir():
            raise FileNotFoundError(errno.ENOENT, "the folder is gone", str(self.folder))

    @contextlib.contextmanager
    def _new_file(self, value: bytes) -> Iterator[Path]:
        new_file = self.folder / f".{os.getpid()}.{threading.get_ident()}.{uuid.uuid4().hex}"
        try:
            new_file.write_bytes(value)
            yield new_file
        finally:
            new_file.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        fd = os.open(self.folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)
