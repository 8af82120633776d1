"""One attempt of one run at a time: dead, alive and fenced holders, and real processes."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from reprieve import Checkpointer, Fenced, FolderInUse
from reprieve.checkpoint.folder import commit, lease, paths
from reprieve.checkpoint.folder.catalog import list_checkpoints
from reprieve.checkpoint.folder.lease import FolderLease, LeaseRecord, acquire, read_record
from reprieve.checkpoint.folder.verify import verify
from reprieve.checkpoint.format.manifest import SENTINEL
from reprieve.host import boot_id, pid_namespace
from reprieve.storage.disk import Disk, OpenFile
from tests.support.helpers import FakeClock, manifest, pool, small_model

MINUTE = timedelta(minutes=1)


def take(
    root: Path, run: str | None = None, *, clock: FakeClock | None = None, wait: timedelta = MINUTE
) -> FolderLease:
    return acquire(Disk(), root, run, wait=wait, clock=clock or FakeClock())


def leave_record(root: Path, **changes: Any) -> None:
    """A record as an attempt on another host would have left it."""
    record = LeaseRecord(run="r", attempt=4, host="elsewhere", boot="another", pid=1, started=0.0)
    (root / ".reprieve").mkdir()
    (root / ".reprieve/owner.json").write_text(json.dumps({**asdict(record), **changes}))


def test_a_new_folder(tmp_path: Path) -> None:
    held_lease = take(tmp_path)
    assert (held_lease.attempt, len(held_lease.run)) == (1, 12)
    held_lease.release()


def test_released_is_taken_over_at_once_and_the_run_goes_on(tmp_path: Path, clock: FakeClock) -> None:
    first = take(tmp_path, "r")
    first.release()
    second = take(tmp_path, clock=clock)
    assert (second.run, second.attempt, clock.slept) == ("r", 2, 0)
    second.release()
    third = take(tmp_path, "other", clock=clock)
    assert (third.run, third.attempt, clock.slept) == ("other", 3, 0)
    third.release()


def test_a_live_one_of_another_run_is_refused_by_name(tmp_path: Path, clock: FakeClock) -> None:
    first = take(tmp_path, "first")
    for run in ("second", None):
        with pytest.raises(FolderInUse, match=rf"run 'first', attempt 1 \(process {os.getpid()} on "):
            take(tmp_path, run, clock=clock)
    assert clock.slept == 0
    first.check()
    first.release()


def test_a_live_one_of_the_same_run_is_waited_for(tmp_path: Path, clock: FakeClock) -> None:
    first = take(tmp_path, "r")

    def ends_after_20_s() -> None:
        if clock.slept > 20:
            first.release()

    clock.on_sleep = ends_after_20_s
    second = take(tmp_path, "r", clock=clock)
    assert second.attempt == 2
    assert 20 < clock.slept < 21
    second.release()


def test_a_live_one_of_the_same_run_is_fenced_in_the_end(tmp_path: Path, clock: FakeClock) -> None:
    first = take(tmp_path, "r")
    second = take(tmp_path, "r", clock=clock)
    assert 59 < clock.slept < 62
    second.check()
    with pytest.raises(Fenced, match="now belongs to run 'r', attempt 2"):
        first.check()
    with pytest.raises(Fenced), first.committing():
        pytest.fail("it may not commit")
    first.release()
    second.check()
    assert not read_record(tmp_path / ".reprieve").released, "the old one has nothing to release"
    second.release()


def test_on_another_machine_a_heartbeat_that_moves_is_life(tmp_path: Path, clock: FakeClock) -> None:
    leave_record(tmp_path)
    record = tmp_path / ".reprieve/owner.json"
    clock.on_sleep = lambda: os.utime(record, (clock.now, clock.now // 5 * 5))
    with pytest.raises(FolderInUse, match="process 1 on elsewhere"):
        take(tmp_path, "another", clock=clock)
    assert clock.slept <= 15
    clock.slept = 0
    held_lease = take(tmp_path, "r", clock=clock)
    assert held_lease.attempt == 5
    assert 59 < clock.slept < 80
    held_lease.release()


def test_a_heartbeat_that_moves_is_seen_where_stat_answers_from_a_cache(
    tmp_path: Path, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on NFS, for up to a minute. Opening a file asks the server."""
    leave_record(tmp_path)
    record = tmp_path / ".reprieve/owner.json"
    stat, cached = os.stat, os.stat(record)
    monkeypatch.setattr(os, "stat", lambda path, **options: cached if path == record else stat(path, **options))
    clock.on_sleep = lambda: os.utime(record, (clock.now, clock.now // 5 * 5))
    with pytest.raises(FolderInUse, match="process 1 on elsewhere"):
        take(tmp_path, "another", clock=clock)


def test_on_another_machine_silence_is_death(tmp_path: Path, clock: FakeClock) -> None:
    leave_record(tmp_path)
    held_lease = take(tmp_path, "another", clock=clock)
    assert (held_lease.run, held_lease.attempt) == ("another", 5)
    assert 15 <= clock.slept < 16
    held_lease.release()


def test_on_this_machine_a_free_lock_is_death_at_once(tmp_path: Path, clock: FakeClock) -> None:
    leave_record(tmp_path, boot=boot_id(), pid_namespace=pid_namespace())
    take(tmp_path, clock=clock).release()
    assert clock.slept == 0


def test_in_another_pod_of_the_node_a_free_lock_means_nothing(tmp_path: Path, clock: FakeClock) -> None:
    """Pods of a node share the boot id; mounts of their own (FUSE, CSI) do not share locks."""
    leave_record(tmp_path, boot=boot_id(), pid_namespace="pid:[1]")
    record = tmp_path / ".reprieve/owner.json"
    clock.on_sleep = lambda: os.utime(record, (clock.now, clock.now // 5 * 5))
    with pytest.raises(FolderInUse, match="process 1 on elsewhere"):
        take(tmp_path, "another", clock=clock)
    clock.on_sleep = lambda: None
    take(tmp_path, "another", clock=clock).release()


def test_in_another_pod_a_held_lock_without_a_heartbeat_is_death(tmp_path: Path, clock: FakeClock) -> None:
    """A server may keep the locks of a client that is gone."""
    leave_record(tmp_path, boot=boot_id(), pid_namespace="pid:[1]")
    with (tmp_path / ".reprieve/owner.lock").open("w") as stale:
        fcntl.flock(stale, fcntl.LOCK_EX)
        held_lease = take(tmp_path, "another", clock=clock)
        assert 15 <= clock.slept < 16
        held_lease.check()
    held_lease.release()


def test_in_a_pod_without_a_name_a_live_one_may_be_the_same_run(
    tmp_path: Path, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replacement pod starts while its predecessor still saves."""
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.96.0.1")
    first = take(tmp_path, "r")

    def ends_after_20_s() -> None:
        if clock.slept > 20:
            first.release()

    clock.on_sleep = ends_after_20_s
    second = take(tmp_path, clock=clock)
    assert (second.run, second.attempt) == ("r", 2)
    assert 20 < clock.slept < 21
    clock.on_sleep = lambda: None
    with pytest.raises(FolderInUse, match=r"in use by run 'r', attempt 2 .*REPRIEVE_RUN.*did not end within 0:01:00"):
        take(tmp_path, clock=clock)
    second.check()
    clock.slept = 0
    with pytest.raises(FolderInUse, match="in use by run 'r'"):
        take(tmp_path, "other", clock=clock)
    assert clock.slept == 0, "a run with another name is not the same"
    second.release()


def test_a_new_job_continues_the_run_that_a_dead_one_left(
    tmp_path: Path, clock: FakeClock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The name is the job's uid there, which another job does not have."""
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.96.0.1")
    first = take(tmp_path, "uid-1")
    with pytest.raises(FolderInUse, match="in use by run 'uid-1'"):
        take(tmp_path, "uid-2", clock=clock)
    first.release()
    second = take(tmp_path, "uid-2", clock=clock)
    assert (second.run, second.record.job) == ("uid-1", "uid-2")
    assert "continuing run 'uid-1'" in caplog.text
    with pytest.raises(FolderInUse, match="in use by run 'uid-1', attempt 2"):
        take(tmp_path, "uid-3", clock=clock)
    assert clock.slept == 0
    third = take(tmp_path, "uid-2", clock=clock)
    assert 59 < clock.slept < 62, "a pod of the same job waits, and fences in the end"
    with pytest.raises(Fenced):
        second.check()
    third.release()


def test_two_that_took_over_at_the_same_moment_without_locks(tmp_path: Path) -> None:
    """Both wrote the same attempt. The one whose record was replaced finds out before it commits."""
    first = take(tmp_path, "r")
    other = replace(first.record, host="another-pod", started=first.record.started + 1)
    (tmp_path / ".reprieve/owner.json").write_text(json.dumps(asdict(other)))
    with pytest.raises(Fenced, match="on another-pod"):
        first.check()
    first.release()


def test_a_record_of_a_newer_version_is_understood(tmp_path: Path, clock: FakeClock) -> None:
    leave_record(tmp_path, released=True, colour="red")
    held_lease = take(tmp_path, "r", clock=clock)
    assert held_lease.attempt == 5
    held_lease.release()


def test_the_same_host_name_is_not_the_same_machine(tmp_path: Path, clock: FakeClock) -> None:
    import socket

    leave_record(tmp_path, host=socket.gethostname())
    record = tmp_path / ".reprieve/owner.json"
    clock.on_sleep = lambda: os.utime(record, (clock.now, clock.now // 5 * 5))
    with pytest.raises(FolderInUse):
        take(tmp_path, "another", clock=clock).release()


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"run": "r"}'])
def test_a_record_that_is_not_readable_is_replaced(tmp_path: Path, text: str) -> None:
    leave_record(tmp_path)
    (tmp_path / ".reprieve/owner.json").write_text(text)
    held_lease = take(tmp_path, "r")
    held_lease.check()
    held_lease.release()


def test_a_record_that_somebody_removed_fences(tmp_path: Path) -> None:
    held_lease = take(tmp_path, "r")
    (tmp_path / ".reprieve/owner.json").unlink()
    with pytest.raises(Fenced, match="removed the lease record"):
        held_lease.check()
    held_lease.release()


def test_the_heartbeat_moves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "HEARTBEAT", timedelta(milliseconds=5))
    held_lease = take(tmp_path, "r")
    record = tmp_path / ".reprieve/owner.json"
    seen = {record.stat().st_mtime_ns}
    end = time.monotonic() + 5
    while len(seen) < 4 and time.monotonic() < end:
        seen.add(record.stat().st_mtime_ns)
        time.sleep(0.005)
    held_lease.release()
    assert len(seen) >= 4


def test_a_fenced_attempt_stops_its_heartbeat_and_gives_up_its_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "HEARTBEAT", timedelta(milliseconds=5))
    first = take(tmp_path, "r")
    second = take(tmp_path, "r", wait=timedelta(milliseconds=1))
    first._heartbeat_thread.join(5)
    assert not first._heartbeat_thread.is_alive()
    end = time.monotonic() + 5
    while second._lock is None and time.monotonic() < end:
        time.sleep(0.005)
    assert second._lock is not None, "the newer one takes the lock when the older one lets go"
    first.release()
    second.release()


def test_two_that_start_in_an_empty_folder_at_the_same_moment(tmp_path: Path) -> None:
    class Waits(Disk):
        """The first to take over is slow to write the record."""

        entered, go = threading.Event(), threading.Event()

        def write_file(self, path: Path, data: bytes, **how: Any) -> None:
            self.entered.set()
            assert self.go.wait(10)
            super().write_file(path, data, **how)

    taken: list[FolderLease | BaseException] = []

    def start(disk: Disk) -> None:
        try:
            taken.append(acquire(disk, tmp_path, "r", wait=timedelta(milliseconds=50), clock=FakeClock()))
        except FolderInUse as error:
            taken.append(error)

    threads = [threading.Thread(target=start, args=(disk,)) for disk in (Waits(), Disk())]
    threads[0].start()
    assert Waits.entered.wait(10)
    threads[1].start()
    time.sleep(0.2)  # it waits for the commit lock by now, or was wise enough not to
    Waits.go.set()
    for thread in threads:
        thread.join()
    owners = [held_lease for held_lease in taken if isinstance(held_lease, FolderLease)]
    fit = 0
    for held_lease in owners:
        try:
            held_lease.check()
            fit += 1
        except Fenced:
            pass
    for held_lease in owners:
        held_lease.release()
    assert fit == 1


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def refuse(fd: int, operation: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(lease, "_COMMIT_WAIT", timedelta(milliseconds=20))
    monkeypatch.setattr(fcntl, "flock", refuse)
    leave_record(tmp_path, released=True)
    held_lease = take(tmp_path, "r")
    with held_lease.committing():
        pass
    held_lease.release()


# Commits


def test_an_old_attempt_cannot_commit_after_a_newer_one_took_over(tmp_path: Path) -> None:
    old = Checkpointer(tmp_path, name="r", model=small_model())
    old.save(1)
    new = Checkpointer(tmp_path, name="r", model=small_model(), take_over_after="1ms")
    with pytest.raises(Fenced, match="attempt 2"):
        old.save(2)
    assert [info.step for info in list_checkpoints(tmp_path)] == [1]
    new.save(2)
    assert [info.manifest.attempt for info in list_checkpoints(tmp_path)] == [2, 1]
    old.close()
    new.close()


def test_an_old_attempt_that_wakes_up_in_the_middle_of_a_save(tmp_path: Path) -> None:
    taken: list[Checkpointer] = []

    class Sleeps(Disk):
        """While the model is flushed a newer attempt starts, and cleans up."""

        def flush(self, file: OpenFile) -> None:
            if file.path.name == "model.safetensors":
                taken.append(Checkpointer(tmp_path, name="r", model=small_model(), take_over_after="1ms"))
            super().flush(file)

    old = Checkpointer(tmp_path, name="r", model=small_model(), disk=Sleeps())
    with pytest.raises(Fenced):
        old.save(1)
    assert list_checkpoints(tmp_path) == []
    taken[0].save(1)
    verify(tmp_path / "checkpoint-1", pool)
    old.close()
    taken[0].close()


def test_an_old_attempt_leaves_the_save_of_a_newer_one_alone(tmp_path: Path) -> None:
    old = take(tmp_path, "r")
    new = take(tmp_path, "r", clock=FakeClock())
    folder = paths.saving(tmp_path, 1, new.attempt)
    commit.begin(Disk(), folder)
    with pytest.raises(Fenced):
        commit.commit(Disk(), tmp_path, folder, manifest(1), old, replacing=None)
    assert [path.name for path in folder.iterdir()] == [SENTINEL]
    old.release()
    new.release()


def test_the_folder_is_given_up_also_while_somebody_holds_the_commit_lock(
    tmp_path: Path, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "_COMMIT_WAIT", timedelta(milliseconds=20))
    first = take(tmp_path, "r")
    with lease._commit_lock(tmp_path / ".reprieve"):
        first.release()
    second = take(tmp_path, "r", clock=clock)
    assert (second.attempt, clock.slept) == (2, 0), "its lock was free"
    second.release()


def test_a_start_that_fails_gives_the_folder_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from reprieve import StorageFull
    from reprieve.checkpoint.folder import disk_space

    with monkeypatch.context() as patch:
        patch.setattr(disk_space, "free_bytes", lambda folder: 10)
        with pytest.raises(StorageFull):
            Checkpointer(tmp_path, model=small_model())
    Checkpointer(tmp_path, model=small_model()).close()


# Processes

HOLD = """
import sys, torch
from reprieve import Checkpointer
checkpointer = Checkpointer(sys.argv[1], name=sys.argv[2], model=torch.nn.Linear(2, 2), take_over_after="30s")
checkpointer.save(int(sys.argv[3]))
print("holding", flush=True)
sys.stdin.read()
"""


def hold(root: Path, run: str, step: int) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(root), run, str(step)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"holding\n"
    return process


def test_two_runs_on_one_folder(tmp_path: Path) -> None:
    process = hold(tmp_path, "first", 1)
    try:
        with pytest.raises(FolderInUse, match=f"run 'first'.*process {process.pid}"):
            Checkpointer(tmp_path, name="second", model=small_model())
        process.send_signal(signal.SIGKILL)
        process.wait()
        start = time.monotonic()
        with Checkpointer(tmp_path, name="first", model=small_model()) as checkpointer:
            assert checkpointer.attempt == 2
        assert time.monotonic() - start < 5, "a dead process's lock is free at once"
    finally:
        process.kill()
        process.communicate()


def test_a_forked_child_does_not_keep_the_lock(tmp_path: Path) -> None:
    """Like a DataLoader worker that outlives the process that started it."""
    code = (
        "import os, sys, time, torch\n"
        "from reprieve import Checkpointer\n"
        "checkpointer = Checkpointer(sys.argv[1], name='r', model=torch.nn.Linear(2, 2))\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    os.close(1)\n"
        "    time.sleep(60)\n"
        "    os._exit(0)\n"
        "print(child, flush=True)\n"
        "os._exit(0)\n"
    )
    process = subprocess.run([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, check=True)
    child = int(process.stdout)
    try:
        clock = FakeClock()
        held_lease = take(tmp_path, "another", clock=clock)
        assert (held_lease.attempt, clock.slept) == (2, 0)
        held_lease.release()
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_child_that_is_forked_during_a_commit_does_not_keep_its_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DataLoader workers are forked while a periodic save commits on another thread."""
    monkeypatch.setattr(lease, "_COMMIT_WAIT", timedelta(seconds=1))
    stop, errors, children = threading.Event(), [], []

    def commit() -> None:
        try:
            while not stop.is_set():
                with lease._commit_lock(tmp_path):
                    pass
        except Exception as error:  # noqa: BLE001 - for the assertion
            errors.append(error)

    threads = [threading.Thread(target=commit) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(60):
            if (pid := os.fork()) == 0:
                time.sleep(10)
                os._exit(0)
            children.append(pid)
            time.sleep(0.005)
        time.sleep(1.2)
    finally:
        stop.set()
        for pid in children:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        for thread in threads:
            thread.join()
    assert errors == []
