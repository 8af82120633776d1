"""Every flipped bit, every truncation, everything missing, added or swapped in a checkpoint is found."""

from __future__ import annotations

import itertools
import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn

from reprieve import Checkpointer, InvalidCheckpoint
from reprieve.checkpoint.folder.verify import verify
from reprieve.checkpoint.format.manifest import MANIFEST
from tests.support.helpers import SOAK, pool, train

FLIPS = 20_000 if SOAK else 600

pytestmark = pytest.mark.soak


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 200 kB: two modules, an optimizer, random numbers, values, a manifest. Tests put back what they change."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 90), nn.ReLU(), nn.Linear(90, 90), nn.Linear(90, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer)
    with Checkpointer(
        tmp_path_factory.mktemp("run"), model=model, ema=nn.Linear(9, 9), optimizer=optimizer
    ) as checkpointer:
        return checkpointer.save(7, epoch=0.5, metrics={"loss": 0.25}, values={"note": "x"}).path


def files(folder: Path) -> list[Path]:
    return sorted(folder.iterdir())


@contextmanager
def changed(path: Path, data: bytes) -> Iterator[None]:
    before = path.read_bytes()
    path.write_bytes(data)
    try:
        yield
    finally:
        path.write_bytes(before)


def is_valid(folder: Path) -> bool:
    try:
        verify(folder, pool)
    except InvalidCheckpoint:
        return False
    return True


def test_every_flipped_bit(checkpoint: Path) -> None:
    """As many by file as by bytes, so that small files and the manifest are covered."""
    assert is_valid(checkpoint)
    chance = random.Random(0)
    data = {path: path.read_bytes() for path in files(checkpoint)}
    paths, sizes = list(data), [len(content) for content in data.values()]
    missed = []
    for number in range(FLIPS):
        path = chance.choice(paths) if number % 2 else chance.choices(paths, sizes)[0]
        bit = chance.randrange(8 * len(data[path]))
        with path.open("r+b") as file:
            file.seek(bit // 8)
            file.write(bytes([data[path][bit // 8] ^ 1 << bit % 8]))
            file.flush()
            if is_valid(checkpoint):
                missed.append((path.name, bit))
            file.seek(bit // 8)
            file.write(data[path][bit // 8 :][:1])
    assert missed == []
    assert is_valid(checkpoint)


def test_every_bit_of_the_manifest(checkpoint: Path) -> None:
    """None of them is in white space or spelling that JSON leaves open."""
    path = checkpoint / MANIFEST
    data = path.read_bytes()
    missed = []
    for bit in range(8 * len(data)) if SOAK else random.Random(1).sample(range(8 * len(data)), 500):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        with changed(path, bytes(flipped)):
            if is_valid(checkpoint):
                missed.append((bit, data[bit // 8 - 9 : bit // 8 + 9]))
    assert missed == []


@pytest.mark.parametrize(
    "details", [{"metrics": {"loss": 1e-07}}, {"metrics": {"précision": 0.5}}], ids=["exponent", "escape"]
)
def test_spellings_that_json_leaves_open(tmp_path: Path, details: dict[str, dict[str, float]]) -> None:
    with Checkpointer(tmp_path, model=nn.Linear(2, 2)) as checkpointer:
        folder = checkpointer.save(1, **details).path
    path = folder / MANIFEST
    data = path.read_bytes()
    at = data.index(b"1e-07") + 1 if b"1e-07" in data else data.index(b"\\u00e9") + 4
    path.write_bytes(data[:at] + bytes([data[at] ^ 0x20]) + data[at + 1 :])
    assert not is_valid(folder)


def test_every_truncation(checkpoint: Path) -> None:
    chance = random.Random(0)
    for path in files(checkpoint):
        data = path.read_bytes()
        last = len(data) - (2 if path.name == MANIFEST else 1)  # the manifest's last byte is below
        lengths = set(range(last)) if SOAK else {0, 1, last, *(chance.randrange(last) for _ in range(60))}
        for length in lengths:
            with changed(path, data[:length]):
                assert not is_valid(checkpoint), (path.name, length)


@pytest.mark.parametrize("change", [lambda data: data[:-1], lambda data: data + b"\n"], ids=["without", "twice"])
def test_the_last_newline_of_the_manifest(checkpoint: Path, change: object) -> None:
    path = checkpoint / MANIFEST
    with changed(path, change(path.read_bytes())):  # type: ignore[operator]
        assert not is_valid(checkpoint)


def test_every_appended_byte(checkpoint: Path) -> None:
    for path in files(checkpoint):
        for byte in (b"\0", b"x"):
            with changed(path, path.read_bytes() + byte):
                assert not is_valid(checkpoint), path.name


def test_every_missing_file(checkpoint: Path, tmp_path: Path) -> None:
    for path in files(checkpoint):
        moved = tmp_path / path.name
        shutil.move(path, moved)
        with pytest.raises(InvalidCheckpoint, match=f"{path.name} is missing"):
            verify(checkpoint, pool)
        shutil.move(moved, path)
    assert is_valid(checkpoint)


def test_swapped_files(checkpoint: Path) -> None:
    names = [path for path in files(checkpoint) if path.name != MANIFEST]
    for first, other in itertools.pairwise(names):
        with changed(first, other.read_bytes()), changed(other, first.read_bytes()):
            assert not is_valid(checkpoint), (first.name, other.name)
    assert is_valid(checkpoint)


def test_the_same_size_from_another_checkpoint(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    with Checkpointer(tmp_path, model=model) as checkpointer:
        first = checkpointer.save(1).path
        model.weight.data += 1
        other = checkpointer.save(2).path
    shutil.copy(other / "model.safetensors", first / "model.safetensors")
    with pytest.raises(InvalidCheckpoint, match=r"model\.safetensors is damaged: block 0"):
        verify(first, pool)


def test_the_bad_block_is_named(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, x=torch.zeros(50_000_000, dtype=torch.uint8), rng=False) as checkpointer:
        folder = checkpointer.save(1).path
    with (folder / "x.pt").open("r+b") as file:
        file.seek(40_000_000)
        file.write(b"\1")
    with pytest.raises(InvalidCheckpoint, match=r"x\.pt is damaged: block 2 \(bytes 33,554,432 to 50,00\d,\d+\)"):
        verify(folder, pool)
