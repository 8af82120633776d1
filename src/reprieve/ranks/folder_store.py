"""A store in a folder that all ranks see: for jobs without a common TCP port, and for tests without torch.

One file a key. `put_once` is `link`, which fails where the name exists, on NFS as well; `set` is a rename; `add`
holds a lock (`flock`, which a killed process gives back). Nothing is flushed: a store lives no longer than its job.
A folder must be new for each start of a job: what an earlier one agreed on would be taken for this one's.
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

_NAME_BYTES = 200
"""File systems take 255."""


class FolderStore:
    """Keys as files in one folder, which is made if it is not there."""

    def __init__(self, folder: str | os.PathLike[str], *, limit: timedelta = ANSWER_LIMIT) -> None:
        self.folder = Path(folder)
        self._limit = limit
        self._errands = TimedCaller(f"store in {folder}")
        self._call(lambda: self.folder.mkdir(parents=True, exist_ok=True))

    def set(self, key: str, value: bytes) -> None:
        def call() -> None:
            with self._fresh(value) as fresh:
                fresh.rename(self._path(key))

        self._call(call)

    def get(self, key: str) -> bytes | None:
        return self._call(lambda: self._read(key))

    def add(self, key: str, amount: int) -> int:
        def call() -> int:
            with self._locked():
                total = int(self._read(key) or 0) + amount
                with self._fresh(str(total).encode()) as fresh:
                    fresh.rename(self._path(key))
                return total

        return self._call(call)

    def put_once(self, key: str, value: bytes) -> bytes:
        def call() -> bytes:
            path = self._path(key)
            with self._fresh(value) as fresh:
                while True:
                    try:
                        os.link(fresh, path)
                        return value
                    except FileExistsError:
                        if (held := self._read(key)) is not None:  # None: removed in between
                            return held

        return self._call(call)

    def wait(self, key: str, limit: timedelta) -> bytes | None:
        end = time.monotonic() + limit.total_seconds()
        pause = 0.002
        while (value := self.get(key)) is None and (left := end - time.monotonic()) > 0:
            time.sleep(min(pause, left))
            pause = min(pause * 1.5, 0.05)
        return value

    def delete(self, key: str) -> None:
        def call() -> None:
            try:
                self._path(key).unlink()
            except FileNotFoundError:
                self._must_be_there()

        self._call(call)

    def client(self) -> FolderStore:
        return FolderStore(self.folder, limit=self._limit)

    def close(self) -> None:
        self._errands.close()

    def _call(self, call: Callable[[], T]) -> T:
        try:
            return self._errands.run(call, self._limit)
        except OSError as error:
            raise StoreLost(self._errands.lose(error.strerror or str(error))) from error

    # What follows runs on the errands' thread.

    def _path(self, key: str) -> Path:
        name = quote(key, safe=" ,=")
        if len(name) > _NAME_BYTES or name.startswith("."):
            name = f"{name[:100].lstrip('.')}~{hashlib.sha256(key.encode()).hexdigest()}"
        return self.folder / name

    def _read(self, key: str) -> bytes | None:
        try:
            return self._path(key).read_bytes()
        except FileNotFoundError:
            self._must_be_there()
            return None

    def _must_be_there(self) -> None:
        if not self.folder.is_dir():
            raise FileNotFoundError(errno.ENOENT, "the folder is gone", str(self.folder))

    @contextlib.contextmanager
    def _fresh(self, value: bytes) -> Iterator[Path]:
        fresh = self.folder / f".{os.getpid()}.{threading.get_ident()}.{uuid.uuid4().hex}"
        try:
            fresh.write_bytes(value)
            yield fresh
        finally:
            fresh.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        fd = os.open(self.folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)
