"""Small states, a fake clock, failing disks, and bitwise comparisons."""

from __future__ import annotations

import errno
import os
import struct
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from reprieve import Checkpointer
from reprieve.checkpoint.buffers.block_pool import BlockPool
from reprieve.checkpoint.format.layout import FileLayout
from reprieve.checkpoint.format.manifest import FileEntry, Manifest
from reprieve.checkpoint.io.writer import Writer
from reprieve.storage.disk import Disk, OpenFile

SOAK = os.environ.get("REPRIEVE_SOAK") == "1"

pool = BlockPool()
"""Shared by all tests of a process: allocating blocks takes longer than most tests."""


class FakeClock:
    """A clock that advances only in `sleep`, which then calls `on_sleep`."""

    def __init__(self) -> None:
        self.now = 1_700_000_000.0
        self.slept = 0.0
        self.on_sleep: Callable[[], object] = lambda: None

    def time(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.slept += seconds
        self.on_sleep()

    def advance(self, seconds: float) -> None:
        self.now += seconds


def write_layouts(folder: Path, layouts: Sequence[FileLayout]) -> dict[str, FileEntry]:
    return Writer(Disk(), pool, folder, layouts).write_through()


def small_model(width: int = 4) -> nn.Module:
    return nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.Linear(width, 2))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2, width: int = 4) -> list[float]:
    losses = []
    for _ in range(steps):
        loss = model(torch.randn(3, width)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def bits(tensor: torch.Tensor) -> bytes:
    """Return the values of a tensor as bytes, in row-major order."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor).reshape(-1).view(torch.uint8).numpy().tobytes()


def assert_same(got: Any, want: Any, path: str = "") -> None:
    """Assert equal types and bitwise equal numbers: NaN equals itself, -0.0 does not equal 0.0."""
    if isinstance(want, torch.Tensor):
        assert isinstance(got, torch.Tensor), path
        assert (got.dtype, got.shape) == (want.dtype, want.shape), path
        assert bits(got) == bits(want), path
        return
    assert type(got) is type(want), path
    if isinstance(want, dict):
        assert list(got) == list(want), path
        for key, value in want.items():
            assert_same(got[key], value, f"{path}.{key}")
    elif isinstance(want, list | tuple):
        assert len(got) == len(want), path
        for number, (found, expected) in enumerate(zip(got, want, strict=True)):
            assert_same(found, expected, f"{path}[{number}]")
    elif isinstance(want, float):
        assert struct.pack("d", got) == struct.pack("d", want), path
    else:
        assert got == want, path


def copied(module: nn.Module) -> dict[str, Any]:
    return {key: value.clone() if isinstance(value, torch.Tensor) else value
            for key, value in module.state_dict().items()}  # fmt: skip


def rewrite_manifest(folder: Path, **changes: Any) -> None:
    """Change a manifest and its checksum, as an attacker would."""
    from dataclasses import replace

    from reprieve.checkpoint.format.manifest import MANIFEST, read_manifest

    (folder / MANIFEST).write_bytes(replace(read_manifest(folder), **changes).encode())


def entry_of(path: Path) -> FileEntry:
    """Return the correct manifest entry of a small file."""
    from reprieve.checkpoint.format.checksum import digest_of

    data = path.read_bytes()
    return FileEntry.of(len(data), [digest_of(data)] if data else [])


def manifest(step: int = 1, **changes: Any) -> Manifest:
    details: dict[str, Any] = {"created": "2026-01-01T00:00:00+00:00", "run": "r", "attempt": 1, "files": {}}
    return Manifest(step=step, **{**details, **changes})


class FailingDisk(Disk):
    """A disk on which the n-th change fails, once or from then on."""

    def __init__(self, at: int = -1, code: int = errno.EIO, *, forever: bool = False) -> None:
        self.at = at
        self.code = code
        self.forever = forever
        self.calls = 0
        self.failed: list[str] = []
        self._lock = threading.Lock()

    def _count(self, verb: str, path: object) -> None:
        with self._lock:
            number, self.calls = self.calls, self.calls + 1
            fail = 0 <= self.at <= number if self.forever else number == self.at
            if fail:
                self.failed.append(f"{verb} {path}")
        if fail:
            raise OSError(self.code, os.strerror(self.code), str(path))

    def make_folder(self, path: Path) -> None:
        self._count("make_folder", path)
        super().make_folder(path)

    def create(self, path: Path, size: int) -> OpenFile:
        self._count("create", path)
        return super().create(path, size)

    def write(self, file: OpenFile, data: memoryview, offset: int) -> None:
        self._count("write", file.path)
        super().write(file, data, offset)

    def truncate(self, file: OpenFile, size: int) -> None:
        self._count("truncate", file.path)
        super().truncate(file, size)

    def flush(self, file: OpenFile) -> None:
        self._count("flush", file.path)
        super().flush(file)

    def flush_folder(self, path: Path) -> None:
        self._count("flush_folder", path)
        super().flush_folder(path)

    def rename(self, source: Path, target: Path) -> None:
        self._count("rename", target)
        super().rename(source, target)

    def exchange(self, first: Path, second: Path) -> bool:
        self._count("exchange", second)
        return super().exchange(first, second)

    def remove(self, path: Path) -> None:
        self._count("remove", path)
        super().remove(path)

    def remove_folder(self, path: Path) -> None:
        self._count("remove_folder", path)
        super().remove_folder(path)


class SlowDisk(Disk):
    """A disk whose writes of checkpoint data wait until `go` is set. `writing` is set when one waits."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.writing = threading.Event()

    def write(self, file: OpenFile, data: memoryview, offset: int) -> None:
        if ".saving" in str(file.path) and file.path.name != "checkpoint-is-incomplete.txt":
            self.writing.set()
            assert self.go.wait(30)
        super().write(file, data, offset)


def saved(root: Path, **state: Any) -> Path:
    with Checkpointer(root, **state) as checkpointer:
        return checkpointer.save(1).path


def restored(root: Path, **state: Any) -> Any:
    with Checkpointer(root, **state) as checkpointer:
        return checkpointer.restore()


class Odd(nn.Module):
    def __init__(self, **buffers: torch.Tensor) -> None:
        super().__init__()
        for name, value in buffers.items():
            self.register_buffer(name, value)
