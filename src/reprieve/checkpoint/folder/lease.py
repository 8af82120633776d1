"""The lease of a checkpoint folder: the right of one attempt of one run to write to it.

`.reprieve/owner.json` names run, attempt, host and process. Its modification time is the heartbeat. A start reads the
record and decides:

    no record, released, or dead      take over, attempt + 1
    the same run, still alive         wait (a pod that is still terminating), then fence it: attempt + 1
    another run, still alive          FolderInUse, by name

In a pod, the run's name identifies a job of the cluster: a new job continues the run that a dead one left in the
folder. A pod without a name waits for a live holder as for its own job, then FolderInUse: it may be another one.

A lock beside the record tells at once whether a holder in the same PID namespace is alive. Elsewhere its heartbeat
decides, by moving, so clocks need not agree: pods of one node may have separate mounts, which do not share locks.

An attempt that was fenced finds out before it commits: the check and the rename happen under a second lock, which a
take-over takes, too.
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
from dataclasses import asdict, dataclass, fields, replace
from datetime import timedelta
from pathlib import Path

from reprieve.checkpoint.folder.paths import LEASE_FOLDER
from reprieve.clock import Clock
from reprieve.errors import Fenced, FolderInUse, OwnershipError, StorageError
from reprieve.host import boot_id, in_pod, pid_namespace
from reprieve.storage.disk import Disk

log = logging.getLogger("reprieve")

HEARTBEAT = timedelta(seconds=5)
_DEAD_AFTER = 3 * HEARTBEAT
"""A holder on another host or in another pod without a heartbeat for this long is dead."""
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
    pid_namespace: str = ""
    """Records before this field have none: then only the heartbeat shows whether the holder is alive."""
    job: str = ""
    """In a pod: the name by which its job was started (`REPRIEVE_RUN`). `run` is the one that the folder has."""
    started_over: str = ""
    """The last request to start over that was carried out (`FolderStartup`)."""

    @classmethod
    def from_json(cls, data: bytes) -> LeaseRecord:
        """Fields that it does not know are ignored."""
        content = json.loads(data)
        return cls(**{entry.name: content[entry.name] for entry in fields(cls) if entry.name in content})

    @property
    def holder(self) -> tuple[object, ...]:
        """What no two holders of a lease share, also where two took it at the same moment for want of locks."""
        return self.run, self.attempt, self.host, self.pid, self.started

    @property
    def shares_locks(self) -> bool:
        """Whether the holder's locks are reliable here: it runs, or ran, in this process's PID namespace."""
        return (self.boot, self.pid_namespace) == (boot_id(), pid_namespace())

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
        if current is None or current.holder != self.record.holder:
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

    def mark_started_over(self, request: str) -> None:
        """Record that this request to start over was carried out."""
        with self.committing():
            self.record = replace(self.record, started_over=request)
            _write_record(self._disk, self._folder, self.record)

    def release(self) -> None:
        """Release the lease, so that the next start need not wait for a heartbeat."""
        if self._stop.is_set():
            return
        self._stop.set()
        self._heartbeat_thread.join()
        try:
            # If the record cannot be written (the commit lock is held), the next start still finds the lock free.
            with contextlib.suppress(OwnershipError, OSError), self.committing():
                # Not flushed: if it is lost, the next start finds the lock free, or no heartbeat.
                _write_record(self._disk, self._folder, replace(self.record, released=True), flush_folder=False)
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
    """Take the lease of `root`. Without a `run`, continue the run of a dead holder, and refuse to take over from a live
    one. `wait`: how long to wait for a live one that may be an earlier attempt of the same run."""
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
        if record is None or record.released:
            is_free = lock is not None
        elif record.shares_locks and folder not in _without_locks:
            is_free = lock is not None  # a lock in the same PID namespace is never wrong
        else:
            is_free = not _heartbeat_moves(folder, record, clock)
        if is_free:
            return _take_over(disk, folder, record, run, lock, clock)
        if lock is not None:
            _unlock(lock)
        if record is not None and not record.released and not _may_be_same_run(record, run):
            raise FolderInUse(_in_use(root, record))
        if clock.monotonic() >= give_up_at:
            if record is None:
                raise FolderInUse(
                    f"another process is taking the lease of {root}, and has not written its record yet. Start again"
                )
            if run is None:
                raise FolderInUse(f"{_in_use(root, record)}. It did not end within {wait}")
            log.warning("%s did not end within %s: taking over from it", record, wait)
            return _take_over(disk, folder, record, run, None, clock)
        if not logged:
            log.warning("%s still uses %s: waiting up to %s for it to end", record or "another process", root, wait)
            logged = True
        clock.sleep(_POLL_S)


def _may_be_same_run(record: LeaseRecord, run: str | None) -> bool:
    if in_pod():
        return run is None or run == (record.job or record.run)
    return record.run == run


def _in_use(root: Path, record: LeaseRecord) -> str:
    if in_pod():
        same_run = "give all pods of the run the same REPRIEVE_RUN, as the runtime reprieve-torch does"
    else:
        same_run = f"if this is the same run, start it with name={record.run!r}"
    return f"{root} is in use by {record}. Use another folder, stop that run first, or, {same_run}"


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
        return LeaseRecord.from_json((folder / "owner.json").read_bytes())
    except FileNotFoundError:
        return None
    except (ValueError, TypeError) as error:
        log.warning("the lease record in %s is not readable and is replaced: %s", folder, error)
        return None


def _take_over(
    disk: Disk, folder: Path, old: LeaseRecord | None, run: str | None, lock: int | None, clock: Clock
) -> FolderLease:
    run_here = old.run if old is not None and (run is None or in_pod()) else run
    record = LeaseRecord(
        run=run_here or uuid.uuid4().hex[:12],
        attempt=old.attempt + 1 if old else 1,
        host=socket.gethostname(),
        boot=boot_id(),
        pid_namespace=pid_namespace(),
        pid=os.getpid(),
        started=clock.time(),
        job=run or "" if in_pod() else "",
        started_over=old.started_over if old else "",
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
    if old is not None and old.job != record.job:
        log.warning("continuing run %r in %s, which %s held before", record.run, folder.parent, old)
    return FolderLease(disk, folder, record, lock)


def _heartbeat_moves(folder: Path, record: LeaseRecord, clock: Clock) -> bool:
    """Whether the holder is alive, which its lock does not tell: locks may not reach another host or pod."""
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
        # Opening asks the server. NFS answers `stat` of a path from a cache that may be a minute old.
        with (folder / "owner.json").open("rb") as file:
            return os.fstat(file.fileno()).st_mtime_ns
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
