"""The lease of a checkpoint folder: the right of one attempt of one run to write to it.

`.reprieve/owner.json` names run, attempt, host and process. Its modification time is the heartbeat. A lock beside it
tells processes on the same host at once whether its holder is alive. A start reads the record and decides:

    no record, released, or dead      take over, attempt + 1
    the same run, still alive         wait (a pod that is still terminating), then fence it: attempt + 1
    another run, still alive          FolderInUse, by name

An attempt that was fenced finds out before it commits: the check and the rename happen under a second lock, which a
take-over takes, too. Whether a holder on another host is alive is decided by watching its heartbeat move, so clocks
need not agree.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import json
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

from reprieve.checkpoint.folder.paths import LEASE_FOLDER
from reprieve.clock import Clock
from reprieve.errors import Fenced, FolderInUse, OwnershipError, StorageError
from reprieve.host import boot_id
from reprieve.storage.disk import Disk

log = logging.getLogger("reprieve")

HEARTBEAT = timedelta(seconds=5)
_DEAD_AFTER = 3 * HEARTBEAT
"""A holder on another host without a heartbeat for this long is dead."""
_COMMIT_WAIT = timedelta(seconds=30)
_POLL_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRecord:
    """The content of `owner.json`: who holds the lease."""

    run: str
    attempt: int
    host: str
    boot: str
    pid: int
    started: float
    released: bool = False

    def __str__(self) -> str:
        return f"run {self.run!r}, attempt {self.attempt} (process {self.pid} on {self.host})"


class LeaseView:
    """The lease that rank 0 holds for all ranks, as another rank sees it."""

    def __init__(self, folder: Path, record: LeaseRecord) -> None:
        self.record = record
        self._folder = folder

    @property
    def run(self) -> str:
        return self.record.run

    @property
    def attempt(self) -> int:
        return self.record.attempt

    def check(self) -> None:
        """Raise Fenced if a newer attempt has taken over."""
        current = read_record(self._folder)
        if current is None and not self._folder.is_dir():
            raise StorageError(errno.ENOENT, f"{self._folder.parent} is gone: check that it is still mounted")
        if current is None or (current.run, current.attempt) != (self.run, self.attempt):
            by = current if current is not None else "a process that removed the lease record"
            raise Fenced(
                f"{self._folder.parent} now belongs to {by}; this is {self.record} and must not write any more. "
                "Stop this process: the newer attempt resumes from the newest checkpoint"
            )

    def release(self) -> None:
        """Do nothing: rank 0 releases the lease."""


class FolderLease(LeaseView):
    """The lease that this process holds. A thread of its own keeps the heartbeat."""

    def __init__(self, disk: Disk, folder: Path, record: LeaseRecord, lock: int | None) -> None:
        super().__init__(folder, record)
        self._disk = disk
        self._lock = lock
        self._stop = threading.Event()
        self._heartbeat_thread = threading.Thread(target=self._keep_alive, name="reprieve-heartbeat", daemon=True)
        self._heartbeat_thread.start()

    @contextlib.contextmanager
    def committing(self) -> Iterator[None]:
        """While inside, no other process can take over. Raises Fenced if one has."""
        with _commit_lock(self._folder):
            self.check()
            yield

    def release(self) -> None:
        """Release the lease, so that the next start need not wait for a heartbeat."""
        if self._stop.is_set():
            return
        self._stop.set()
        self._heartbeat_thread.join()
        try:
            # If the record cannot be written (the commit lock is held), the next start still finds the lock free.
            with contextlib.suppress(OwnershipError, OSError), self.committing():
                released = LeaseRecord(**{**asdict(self.record), "released": True})
                # Not flushed: if it is lost, the next start finds the lock free, or no heartbeat.
                _write_record(self._disk, self._folder, released, flush_folder=False)
        finally:
            self._unlock()

    def _keep_alive(self) -> None:
        path = self._folder / "owner.json"
        while not self._stop.wait(HEARTBEAT.total_seconds()):
            try:
                self.check()
                if self._lock is None:  # taken over from a live attempt that held it
                    self._lock = _try_lock(self._folder / "owner.lock")
                self._disk.touch(path)
            except Fenced as error:
                log.error("%s", error)
                self._unlock()
                return
            except OSError as error:
                log.warning("heartbeat to %s failed, retrying every %g s: %s", path, HEARTBEAT.total_seconds(), error)

    def _unlock(self) -> None:
        lock, self._lock = self._lock, None
        if lock is not None:
            _unlock(lock)


def acquire(disk: Disk, root: Path, run: str | None, *, wait: timedelta, clock: Clock) -> FolderLease:
    """Take the lease of `root`. Without a `run`, continue the run of a dead holder and refuse that of a live one."""
    folder = root / LEASE_FOLDER
    if not folder.is_dir():
        with contextlib.suppress(FileExistsError):
            disk.make_folder(folder)
        disk.flush_folder(root)
    give_up_at = clock.monotonic() + wait.total_seconds()
    logged = False
    while True:
        lock = _try_lock(folder / "owner.lock")
        record = read_record(folder)
        if lock is not None and (record is None or record.released or not _alive(folder, record, clock)):
            return _take_over(disk, folder, record, run, lock, clock)
        if lock is not None:
            _unlock(lock)
        if record is not None and (run is None or record.run != run):
            raise FolderInUse(
                f"{root} is in use by {record}. Use another folder, stop that run first, or, if this is the same "
                f"run, start it with name={record.run!r}"
            )
        if clock.monotonic() >= give_up_at:
            if record is None:
                raise FolderInUse(
                    f"another process is taking the lease of {root}, and has not written its record yet. Start again"
                )
            log.warning("%s did not end within %s: taking over from it", record, wait)
            return _take_over(disk, folder, record, run, None, clock)
        if not logged:
            log.warning("%s still uses %s: waiting up to %s for it to end", record or "another process", root, wait)
            logged = True
        clock.sleep(_POLL_S)


def join(root: Path, record: LeaseRecord, *, rank: int, wait: timedelta, clock: Clock) -> LeaseView:
    """Join the lease of rank 0. Seeing its record shows that this rank sees the same folder."""
    folder = root / LEASE_FOLDER
    end = clock.monotonic() + wait.total_seconds()
    while read_record(folder) != record:
        if clock.monotonic() >= end:  # longer than network file systems cache
            raise StorageError(
                errno.ENOENT,
                f"rank {rank} on {socket.gethostname()} does not see in {root} what rank 0 on {record.host} wrote: "
                "checkpoints of several ranks need a folder that all of them share. Use a shared volume (NFS, a "
                "ReadWriteMany claim) or an object store",
            )
        clock.sleep(_POLL_S)
    return LeaseView(folder, record)


def read_record(folder: Path) -> LeaseRecord | None:
    """The lease record in `folder`; None if there is none that can be read."""
    try:
        return LeaseRecord(**json.loads((folder / "owner.json").read_bytes()))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError) as error:
        log.warning("the lease record in %s is not readable and is replaced: %s", folder, error)
        return None


def _take_over(
    disk: Disk, folder: Path, old: LeaseRecord | None, run: str | None, lock: int | None, clock: Clock
) -> FolderLease:
    record = LeaseRecord(
        run=run or (old.run if old else uuid.uuid4().hex[:12]),
        attempt=old.attempt + 1 if old else 1,
        host=socket.gethostname(),
        boot=boot_id(),
        pid=os.getpid(),
        started=clock.time(),
    )
    try:
        with _commit_lock(folder):
            current = read_record(folder)
            if current is not None and old is not None and current.attempt != old.attempt:
                raise FolderInUse(
                    f"{current} took over {folder.parent} at the same moment. Stop it, or use another folder"
                )
            _write_record(disk, folder, record)
    except BaseException:
        if lock is not None:
            _unlock(lock)
        raise
    return FolderLease(disk, folder, record, lock)


def _alive(folder: Path, record: LeaseRecord, clock: Clock) -> bool:
    """Whether the holder is alive although its lock is free: locks may not reach another host."""
    if record.boot == boot_id() and folder not in _without_locks:
        return False  # locks on the same host are never wrong
    log.info("%s may still be alive: watching its heartbeat for %s", record, _DEAD_AFTER)
    seen = _heartbeat(folder)
    end = clock.monotonic() + _DEAD_AFTER.total_seconds()
    while clock.monotonic() < end:
        clock.sleep(_POLL_S)
        if _heartbeat(folder) != seen:
            return True
    return False


def _heartbeat(folder: Path) -> int:
    try:
        return (folder / "owner.json").stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def _write_record(disk: Disk, folder: Path, record: LeaseRecord, *, flush_folder: bool = True) -> None:
    data = json.dumps(asdict(record), indent=1).encode() + b"\n"
    disk.replace_file(folder / "owner.json", data, flush_folder=flush_folder)


_locks: set[int] = set()
"""Lock files that this process has open. A forked child (a DataLoader worker) must not keep them locked."""


_without_locks: set[Path] = set()
"""Folders on file systems that refuse locks."""


_no_fork = threading.Lock()
"""Held while `_locks` differs from the files that are open."""


def _forget_in_child() -> None:
    for fd in _locks:
        with contextlib.suppress(OSError):
            os.close(fd)
    _locks.clear()
    _no_fork.release()


def _try_lock(path: Path) -> int | None:
    """The descriptor of the lock, or None if another process holds it."""
    _close_locks_in_children()
    with _no_fork:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        _locks.add(fd)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        _close(fd)
        return None
    except OSError as error:  # Lustre without -o flock, NFS without a lock daemon
        if path.parent not in _without_locks:
            log.warning(
                "%s does not support locks (%s): only heartbeats show who holds it", path.parent, error.strerror
            )
        _without_locks.add(path.parent)
    return fd


def _unlock(fd: int) -> None:
    with contextlib.suppress(OSError):  # a file system without locks
        fcntl.flock(fd, fcntl.LOCK_UN)
    _close(fd)


def _close(fd: int) -> None:
    with _no_fork:
        _locks.discard(fd)
        os.close(fd)


@functools.cache
def _close_locks_in_children() -> None:
    # DataLoader workers are forked while another thread commits: a worker that inherits a lock keeps it locked.
    os.register_at_fork(before=_no_fork.acquire, after_in_parent=_no_fork.release, after_in_child=_forget_in_child)


@contextlib.contextmanager
def _commit_lock(folder: Path) -> Iterator[None]:
    path = folder / "commit.lock"
    end = time.monotonic() + _COMMIT_WAIT.total_seconds()
    while (fd := _try_lock(path)) is None:
        if time.monotonic() > end:
            raise FolderInUse(
                f"{path} has been held for {_COMMIT_WAIT}: its holder may be stopped (SIGSTOP). Kill it first"
            )
        time.sleep(0.01)
    try:
        yield
    finally:
        _unlock(fd)
