"""The rigs' own tests: a cut loses what was not synced and nothing else, and the recorder finds a missing flush."""

from __future__ import annotations

import errno
import mmap
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.powercut.rigs.loopfs import LoopDisk, why_unavailable
from tests.powercut.rigs.recorder import Entry, Flush, Mark, Recorder, Write
from tests.powercut.rigs.recorder import why_unavailable as why_no_recorder
from tests.powercut.rigs.replay import CrashState, Outcome, check_crashes, images
from tests.support.places import ROOT

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(why_unavailable() is not None, reason=str(why_unavailable())),
]
needs_recorder = pytest.mark.skipif(why_no_recorder() is not None, reason=str(why_no_recorder()))

OLD, NEW = b"old!" * 50_000, b"new." * 50_000


def write(path: Path, data: bytes, *, sync: bool) -> None:
    with open(path, "wb") as file:
        file.write(data)
        if sync:
            file.flush()
            os.fsync(file.fileno())


def holds(path: Path, *contents: bytes) -> bool:
    """A plain bool: pytest takes minutes to explain where 200 kB of bytes differ, and some are meant to."""
    return path.read_bytes() in contents


def sync_folder(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def overwrite_direct(path: Path, *, sync: bool) -> None:
    aligned = mmap.mmap(-1, 64 << 10)
    aligned.write(b"n" * len(aligned))
    fd = os.open(path, os.O_WRONLY | os.O_DIRECT)
    assert os.write(fd, aligned) == len(aligned)
    if sync:
        os.fdatasync(fd)
    os.close(fd)


def in_a_process(code: str, *args: object) -> subprocess.Popen[str]:
    """A Python that runs the code with the rigs importable, and prints 'ready' when it is ready."""
    command = [sys.executable, "-c", code, *map(str, args)]
    return subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def is_mounted(path: Path) -> bool:
    return str(path) in Path("/proc/self/mounts").read_text()


# ---- LoopDisk


def test_a_cut_loses_what_was_not_synced_and_keeps_what_was() -> None:
    with LoopDisk() as disk:
        write(disk.path / "synced", NEW, sync=True)
        sync_folder(disk.path)
        write(disk.path / "unsynced", NEW, sync=False)
        disk.cut()
        disk.remount()
        assert holds(disk.path / "synced", NEW)
        assert not (disk.path / "unsynced").exists()


def test_nothing_can_be_written_after_a_cut_until_the_remount() -> None:
    with LoopDisk() as disk:
        disk.cut()
        with pytest.raises(OSError, match="Input/output error") as caught:
            write(disk.path / "file", NEW, sync=True)
        assert caught.value.errno == errno.EIO
        disk.remount()
        write(disk.path / "file", NEW, sync=True)


def test_a_clean_unmount_keeps_all() -> None:
    with LoopDisk() as disk:
        write(disk.path / "file", NEW, sync=False)
        disk.remount()
        assert holds(disk.path / "file", NEW)


def test_direct_io_works_but_a_cut_does_not_notice_its_missing_flush() -> None:
    with LoopDisk() as disk:
        write(disk.path / "file", b"o" * (64 << 10), sync=True)
        overwrite_direct(disk.path / "file", sync=False)
        disk.cut()
        disk.remount()
        assert holds(disk.path / "file", b"n" * (64 << 10))


def test_a_process_that_holds_a_file_does_not_stop_cut_remount_or_cleanup() -> None:
    with LoopDisk() as disk:
        write(disk.path / "file", OLD, sync=True)
        code = (
            "import sys\nf = open(sys.argv[1], 'ab', 0)\nprint('ready', flush=True)\nsys.stdin.readline()\n"
            "try: f.write(b'late')\nexcept OSError: print('refused', flush=True)\nsys.stdin.read()"
        )
        with in_a_process(code, disk.path / "file") as holder:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "ready\n"
            disk.cut()
            disk.remount()
            out, _ = holder.communicate("go\n")
        assert out == "refused\n"
        assert holds(disk.path / "file", OLD)
        disk.cut()
        disk.remount()
        assert holds(disk.path / "file", OLD)
    assert not is_mounted(disk.path)


def test_a_process_that_writes_through_the_old_mount_does_not_reach_the_new_one() -> None:
    code = (
        "import os, sys\nf = open(sys.argv[1], 'ab', 0)\nprint('ready', flush=True)\nsys.stdin.readline()\n"
        "f.write(b'late')\nos.fsync(f.fileno())"
    )
    with LoopDisk() as disk:
        write(disk.path / "file", OLD, sync=True)
        with in_a_process(code, disk.path / "file") as holder:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "ready\n"
            disk.remount()
            holder.communicate("go\n")
        assert holder.returncode == 0
        disk.remount()
        assert holds(disk.path / "file", OLD)


def test_a_mount_namespace_that_outlives_a_cut_does_not_write_into_the_new_mount() -> None:
    """Tests in parallel workers make such namespaces, and each has a copy of every mount."""
    with LoopDisk() as disk:
        folder, other = disk.path / "folder", disk.path / "other"
        for path in (folder, other):
            path.mkdir()
            write(path / "old", OLD, sync=True)
        pipe = subprocess.PIPE
        with subprocess.Popen(["unshare", "--mount", "cat"], stdin=pipe, stdout=pipe, text=True) as holder:
            assert holder.stdin is not None
            assert holder.stdout is not None
            print("ready", file=holder.stdin, flush=True)
            assert holder.stdout.readline() == "ready\n"
            disk.cut()
            disk.remount()
            write(folder / "new", NEW, sync=True)
            for number in range(300):  # until the journal, which would restore the folder, is full of other things
                write(other / str(number), b"", sync=True)
            holder.communicate()
        disk.cut()
        disk.remount()
        assert (folder / "new").exists()
        assert holds(folder / "new", NEW)


def test_several_processes_may_take_loop_devices_at_once() -> None:
    code = (
        "from tests.powercut.rigs.loopfs import LoopDisk\n"
        "with LoopDisk() as disk:\n"
        "    for _ in range(10):\n"
        "        disk.cut()\n"
        "        disk.remount()\n"
    )
    processes = [in_a_process(code) for _ in range(4)]
    for process in processes:
        process.communicate()
    assert [process.returncode for process in processes] == [0, 0, 0, 0]


@pytest.mark.parametrize(
    "rig", ["loopfs import LoopDisk", pytest.param("recorder import Recorder", marks=needs_recorder)]
)
def test_nothing_is_left_of_a_rig_whose_test_was_killed(rig: str) -> None:
    use = "with Rig() as rig: print(rig.path, flush=True); sys.stdin.read()"
    code = f"from tests.powercut.rigs.{rig} as Rig\nimport sys\n{use}"
    with in_a_process(code) as process:
        assert process.stdout is not None
        path = Path(process.stdout.readline().strip())
        assert is_mounted(path)
        process.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 10
    while is_mounted(path.parent) or path.parent.exists():
        assert time.monotonic() < deadline, "mount or folder left behind"
        time.sleep(0.02)


# ---- Recorder and replay


def record(before: Callable[[Path], None], work: Callable[[Path], None]) -> tuple[list[Entry], bytes]:
    """The log of `work` between the marks "begin" and "done", on a disk where `before` was done and synced."""
    with Recorder() as recorder:
        before(recorder.path)
        sync_folder(recorder.path)
        recorder.mark("begin")
        work(recorder.path)
        recorder.mark("done")
        # What a machine that goes on does later, so that there are crashes after the mark.
        write(recorder.path / "later", OLD, sync=True)
        return recorder.stop(), recorder.base


def crash(before: Callable[[Path], None], work: Callable[[Path], None], check: Callable[[Path, bool], None]) -> Outcome:
    log, base = record(before, work)

    def verdict(path: Path, state: CrashState) -> None:
        check(path, "done" in state.marks)

    outcome = check_crashes(log, base, verdict, since="begin", subsets=200)
    assert outcome.states > 100
    return outcome


def nothing(path: Path) -> None: ...


def new_file_whole_when_done(path: Path, done: bool) -> None:
    if done:
        assert holds(path / "file", NEW)


@needs_recorder
def test_the_log_has_writes_flushes_and_marks_in_order() -> None:
    log, base = record(nothing, lambda path: write(path / "file", NEW, sync=True))
    begin, done = log.index(Mark("begin")), log.index(Mark("done"))
    during = log[begin + 1 : done]
    assert sum(len(entry.data) for entry in during if isinstance(entry, Write)) >= len(NEW)
    assert isinstance(during[-1], Flush)
    assert any(NEW[:4096] in entry.data for entry in during if isinstance(entry, Write))
    assert NEW[:4096] not in base


@needs_recorder
def test_a_synced_file_is_whole_in_every_state_after_the_mark() -> None:
    def work(path: Path) -> None:
        write(path / "file", NEW, sync=True)
        sync_folder(path)

    assert crash(nothing, work, new_file_whole_when_done).failures == []


@needs_recorder
def test_an_unsynced_file_is_lost_in_some_state() -> None:
    def work(path: Path) -> None:
        write(path / "file", NEW, sync=False)

    assert crash(nothing, work, new_file_whole_when_done).failures


def put_old(path: Path) -> None:
    write(path / "file", OLD, sync=True)


def old_or_new(path: Path, done: bool) -> None:
    assert holds(path / "file", *((NEW,) if done else (OLD, NEW)))


@needs_recorder
def test_write_sync_rename_sync_replaces_a_file_in_one_step() -> None:
    def work(path: Path) -> None:
        write(path / "file.tmp", NEW, sync=True)
        os.rename(path / "file.tmp", path / "file")
        sync_folder(path)

    assert crash(put_old, work, old_or_new).failures == []


@needs_recorder
def test_a_file_renamed_without_a_sync_is_torn_in_some_state() -> None:
    def work(path: Path) -> None:
        write(path / "file.tmp", NEW, sync=False)
        os.rename(path / "file.tmp", path / "file")
        sync_folder(path)

    def absent_or_whole(path: Path, _: bool) -> None:
        if (path / "file").exists():
            assert holds(path / "file", NEW), "torn"

    failures = crash(nothing, work, absent_or_whole).failures
    assert any("torn" in str(error) for _, error in failures)


@needs_recorder
@pytest.mark.parametrize("sync", [True, False])
def test_a_missing_flush_after_direct_io_is_found(sync: bool) -> None:
    def before(path: Path) -> None:
        write(path / "file", b"o" * (64 << 10), sync=True)

    def new_when_done(path: Path, done: bool) -> None:
        assert not done or holds(path / "file", b"n" * (64 << 10))

    outcome = crash(before, lambda path: overwrite_direct(path / "file", sync=sync), new_when_done)
    assert (not outcome.failures) == sync


@needs_recorder
def test_the_same_seed_gives_the_same_states() -> None:
    log, base = record(nothing, lambda path: write(path / "file", NEW, sync=True))

    def states(seed: int) -> list[CrashState]:
        found = []
        for state, image in images(log, base, subsets=50, seed=seed):
            found.append(state)
            os.close(image)
        return found

    assert states(1) == states(1)
    assert states(1) != states(2)
