"""The verbs of Disk on file systems that do not support their fast path."""

from __future__ import annotations

import ast
import errno
import os
from pathlib import Path

import pytest

import reprieve
from reprieve.storage import disk as disk_module
from reprieve.storage.disk import Disk
from reprieve.storage.uri import local_path
from tests.powercut.rigs.promise import Job, check_promise

SOURCE = Path(reprieve.__file__).parent


def save_and_check(root: Path) -> None:
    job = Job()
    with job.checkpointer(root) as checkpointer:
        checkpointer.save(job.at(1).extra["seen"])
    assert check_promise(root, 1) == 1


def test_direct_io_is_used_where_it_can_be(tmp_path: Path) -> None:
    disk = Disk()
    file = disk.create(tmp_path / "file", 10_000)
    try:
        assert file.direct, "the tests' own file system is expected to take direct I/O"
        assert os.fstat(file.fd).st_size >= 10_000, "room is reserved"
    finally:
        disk.close(file)


def test_a_file_system_that_says_no_to_direct_io(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_module, "_direct_by_pages", lambda fd: False)
    save_and_check(tmp_path / "checkpoints")


def test_a_file_system_that_refuses_the_flag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def refuse(path: object, flags: int, *rest: object, **more: object) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no direct I/O here")
        return real(path, flags, *rest, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", refuse)
    save_and_check(tmp_path / "checkpoints")


def test_a_file_system_that_refuses_the_first_write_and_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fcntl

    real_write, real_read, refused = os.pwrite, os.preadv, []

    def direct(fd: int) -> bool:
        return bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)

    def write(fd: int, data: memoryview, offset: int) -> int:
        if direct(fd):
            refused.append("write")
            raise OSError(errno.EINVAL, "not aligned enough")
        return real_write(fd, data, offset)

    def read(fd: int, buffers: list[memoryview], offset: int, flags: int = 0) -> int:
        if direct(fd):
            refused.append("read")
            raise OSError(errno.EINVAL, "not aligned enough")
        return real_read(fd, buffers, offset, flags)

    monkeypatch.setattr(os, "pwrite", write)
    monkeypatch.setattr(os, "preadv", read)
    save_and_check(tmp_path / "checkpoints")
    assert {"write", "read"} <= set(refused)


def test_a_write_that_is_cut_short_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: real(fd, data[:4096], offset))
    save_and_check(tmp_path / "checkpoints")


def test_only_the_disk_module_changes_a_file_system() -> None:
    """Crash tests replace `Disk`: a change that bypasses it would not be tested."""
    verbs = (
        "mkdir makedirs rename replace unlink rmdir rmtree symlink link touch utime "
        "write_bytes write_text pwrite fsync fdatasync ftruncate truncate"
    )
    changing = set(verbs.split())
    found = set()
    for path in SOURCE.rglob("*.py"):
        name = str(path.relative_to(SOURCE))
        # These need not survive a power cut: the keys of a store, what the launcher and progress write, the folder of
        # the launcher's socket, what Hugging Face writes for Reprieve to collect, what fine-tuning makes again from the
        # data and the last checkpoint, and the script of a submitted function. Tests are not production.
        collected = "adapters/transformers/save/checkpoint_contents.py"
        if name in ("storage/disk.py", "ranks/folder_store.py", "launcher_protocol.py", collected):
            continue
        if name.startswith(("finetune/", "launch/", "progress/", "sdk/", "testing/")):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in changing:
                through_disk = "disk" in ast.unparse(node.func.value)
                of_text = node.func.attr == "replace" and (len(node.args) != 1 or node.keywords)  # or of a dataclass
                if not through_disk and not of_text:
                    found.add((name, node.lineno, ast.unparse(node.func)))
    assert not found


def test_uris(tmp_path: Path) -> None:
    assert local_path(tmp_path) == tmp_path
    assert local_path("relative") == Path.cwd() / "relative"
    assert local_path("file:///a%20b") == Path("/a b")
    for bad in ("", "s3://bucket/x", "file://elsewhere/x"):
        with pytest.raises(reprieve.ConfigError):
            local_path(bad)
