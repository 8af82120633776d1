"""The warm-up reads and verifies the newest checkpoint while the command still imports torch."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from pathlib import Path

import pytest
import torch

from reprieve import Checkpointer
from reprieve.checkpoint.buffers.block_pool import BLOCK_BYTES
from reprieve.checkpoint.io import reader
from reprieve.launch.node_share import NodeShare
from reprieve.launch.page_cache_warmup import PageCacheWarmup
from reprieve.storage.disk import OpenFile, read_from_cache

_libc = ctypes.CDLL(None, use_errno=True)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two checkpoints that are not in the page cache."""
    model = torch.nn.Linear(512, 512)
    with Checkpointer(tmp_path / "checkpoints", model=model) as checkpointer:
        for step in (10, 20):
            checkpointer.save(step)
    forget(tmp_path / "checkpoints")
    return tmp_path / "checkpoints"


def forget(root: Path) -> None:
    for path in (path for path in root.rglob("*") if path.is_file()):
        with path.open("rb") as file:
            os.fdatasync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def in_memory(path: Path) -> bool:
    """Whether the kernel has all of it in the page cache."""
    return all(resident(path))


def resident(path: Path) -> list[bool]:
    """Which of its pages the kernel has in the page cache."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as mapped:
        pages = (ctypes.c_ubyte * -(-len(mapped) // mmap.PAGESIZE))()
        first = ctypes.c_char.from_buffer(mapped)
        failed = _libc.mincore(ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(len(mapped)), pages)
        del first  # or the map cannot be closed
    assert not failed, os.strerror(ctypes.get_errno())
    return [bool(page & 1) for page in pages]


@pytest.fixture(autouse=True)
def _looks_start_no_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look into the page cache that finds nothing makes the kernel read ahead, and now and then (twice in 1000) that
    is done before the look is over."""
    monkeypatch.setattr(
        reader, "read_from_cache", lambda file, *rest: in_memory(file.path) and read_from_cache(file, *rest)
    )


def warmed(root: Path) -> None:
    with PageCacheWarmup(str(root)):
        wait_for_it()


def wait_for_it() -> None:
    for thread in threading.enumerate():
        if thread.name == "reprieve warm-up":
            thread.join(60)


def weights(root: Path, step: int) -> Path:
    return root / f"checkpoint-{step}" / "model.safetensors"


def test_the_newest_is_in_memory_afterwards(root: Path) -> None:
    assert not in_memory(weights(root, 20))
    warmed(root)
    assert in_memory(weights(root, 20)) and not in_memory(weights(root, 10))


def test_nodes_read_a_checkpoint_once_between_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four spans of 16 MiB go round the nodes."""
    spans: set[int] = set()
    real = reader.read_into

    def read_into(file: OpenFile, buffer: memoryview, offset: int) -> int:
        if file.path.name == "model.safetensors":
            spans.add(offset // BLOCK_BYTES)
        return real(file, buffer, offset)

    monkeypatch.setattr(reader, "read_into", read_into)
    root = tmp_path / "checkpoints"
    with Checkpointer(root, model=torch.nn.Linear(4096, 4096)) as checkpointer:
        checkpointer.save(20)
    for node, read in enumerate(({0, 2}, {1, 3})):
        forget(root)
        spans.clear()
        with PageCacheWarmup(str(root), NodeShare(nodes=2, node=node)):
            wait_for_it()
        pages, span = resident(weights(root, 20)), BLOCK_BYTES // mmap.PAGESIZE
        assert {number for number in spans if number < 4} == read
        assert all(all(pages[number * span : (number + 1) * span]) for number in read)


def test_a_node_that_does_not_know_its_number_reads_nothing(root: Path) -> None:
    with PageCacheWarmup(str(root), NodeShare(nodes=2, node=None)):
        wait_for_it()
    assert not in_memory(weights(root, 20))


def test_a_restore_asks_the_disk_for_nothing_then(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Path] = []
    real = reader.read_into
    monkeypatch.setattr(reader, "read_into", lambda file, *rest: asked.append(file.path) or real(file, *rest))

    def restore() -> None:
        asked.clear()
        with Checkpointer(root, model=torch.nn.Linear(512, 512)) as checkpointer:
            restored = checkpointer.restore()
        assert restored is not None and restored.step == 20

    restore()
    assert weights(root, 20) in asked
    warmed(root)
    restore()
    assert not asked


def test_what_came_from_memory_was_not_read_back(root: Path) -> None:
    """It must not cause older checkpoints to be removed: the disk may hold other bytes than the page cache."""

    def read_back() -> int | None:
        with Checkpointer(root, model=torch.nn.Linear(512, 512)) as checkpointer:
            checkpointer.restore()
            return checkpointer._pruner.verified

    assert read_back() == 20
    warmed(root)
    assert read_back() is None


def test_a_bad_one_is_told_of(root: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = weights(root, 20)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    warmed(root)
    assert "checkpoint-20 is not valid" in capfd.readouterr().err


def test_it_leaves_off_when_the_run_is_there(root: Path) -> None:
    warming = PageCacheWarmup(str(root))
    warming.stop()
    with warming:
        wait_for_it()
    assert not in_memory(weights(root, 20))


@pytest.mark.parametrize("folder", [None, "nowhere"])
def test_nothing_to_read(tmp_path: Path, folder: str | None) -> None:
    with PageCacheWarmup(None if folder is None else str(tmp_path / folder)):
        pass
