"""The verifying reader, with blocks of any size: needed blocks are read, verified and delivered once."""

from __future__ import annotations

import contextlib
import itertools
import random
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reprieve.checkpoint.buffers.block_pool import BLOCK_BYTES, Block, BlockPool
from reprieve.checkpoint.format.checksum import digest_of
from reprieve.checkpoint.format.manifest import FileEntry
from reprieve.checkpoint.io import reader as reader_module
from reprieve.checkpoint.io.reader import CheckpointFile, Reader, Span, Target
from reprieve.errors import InvalidCheckpoint
from reprieve.storage.disk import PAGE, OpenFile
from tests.support.helpers import SOAK

pytestmark = pytest.mark.soak

FOLDERS = [Path(folder) for folder in (tempfile.gettempdir(), "/dev/shm") if Path(folder).is_dir()]


class CountingDestination:
    """A destination that counts how often each byte arrives. If asynchronous, it reads the block only in `finish`."""

    def __init__(self, length: int, *, asynchronous: bool) -> None:
        self.asynchronous = asynchronous
        self.data = bytearray(length)
        self.times = np.zeros(length, dtype=np.int64)
        self._pending: list[tuple[Block, int, int, int]] = []
        self._lock = threading.Lock()

    def put(self, block: Block, at: int, start: int, stop: int) -> None:
        with self._lock:
            self._pending.append((block, at, start, stop))
            if not self.asynchronous:
                self._copy()

    def finish(self) -> None:
        with self._lock:
            self._copy()

    def _copy(self) -> None:
        for block, at, start, stop in self._pending:
            self.data[start:stop] = block.view[at : at + stop - start]
            self.times[start:stop] += 1
        self._pending.clear()


def random_file(path: Path, chance: random.Random, *, uniform: bool = False) -> tuple[bytes, FileEntry]:
    """Write a file in blocks of one to 40 pages; with `uniform`, in a single block."""
    starts = [0]
    for _ in range(chance.choice([0, 1, 2, 10, 60])):
        pages = chance.choice([1, 1, 2, chance.randrange(1, 40)])
        starts.append(starts[-1] + pages * PAGE)
    size = starts[-1] + chance.choice([1, 100, PAGE - 1, PAGE, chance.randrange(1, 20 * PAGE)])
    if chance.random() < 0.1:
        starts, size = [], 0
    content = chance.randbytes(size)
    path.write_bytes(content)
    if uniform:
        return content, FileEntry.of(size, [digest_of(content)] if size else [])
    blocks = [digest_of(content[start:stop]) for start, stop in itertools.pairwise([*starts, size])]
    return content, FileEntry.of(size, blocks, starts)


def random_targets(size: int, chance: random.Random, *, overlap: bool) -> list[Target]:
    """Return targets that end at, before and behind page boundaries."""
    count = chance.choice([0, 1, 3, 12]) if size else 0
    points = sorted(min(size, max(0, chance.randrange(size + 1) // PAGE * PAGE + chance.choice([-1, 0, 1, 64])))
                    for _ in range(2 * count))  # fmt: skip
    ranges = list(zip(points[::2], points[1::2], strict=True))
    if overlap and size:
        ranges += [tuple(sorted(chance.choices(range(size + 1), k=2))) for _ in range(4)]  # type: ignore[misc]
        ranges += ranges[:1]
    chance.shuffle(ranges)
    return [
        Target(start, stop - start, CountingDestination(stop - start, asynchronous=chance.random() < 0.4))
        for start, stop in ranges
        if start < stop
    ]


@contextlib.contextmanager
def recorded_reads() -> Iterator[list[tuple[str, int, int]]]:
    """Record each read from the disk, as file, offset and bytes."""
    recorded: list[tuple[str, int, int]] = []
    real = reader_module.read_into

    def read_into(file: OpenFile, buffer: memoryview, offset: int) -> int:
        done = real(file, buffer, offset)
        recorded.append((file.path.name, offset, done))
        return done

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reader_module, "read_into", read_into)
        yield recorded


class ReadAlone:
    """A cooperative read with no other ranks."""

    def read(self, spans: Sequence[Span], *, progress: Callable[[int], None] | None) -> None:
        for span in spans:
            block = Block(pinned=False)
            span.file.load(span, block)
            span.file.deliver(span, block)
            if progress is not None:
                progress(span.length)


def needed_blocks(entry: FileEntry, targets: Sequence[Target], *, only_targets: bool) -> set[int]:
    """Compute the blocks to read, slowly and simply."""
    edges = list(itertools.pairwise(entry.edges(BLOCK_BYTES)))
    return {
        number
        for number, (start, stop) in enumerate(edges)
        if not only_targets or any(target.offset < stop and target.offset + target.length > start for target in targets)
    }


def all_delivered(content: bytes, targets: Sequence[Target]) -> bool:
    """Return whether every byte of every target arrived once."""
    for target in targets:
        destination: Any = target.destination
        if (
            not (destination.times == 1).all()
            or destination.data != content[target.offset : target.offset + target.length]
        ):
            return False
    return True


@settings(max_examples=2000 if SOAK else 150)
@given(st.integers(0, 2**63), st.booleans(), st.sampled_from(FOLDERS), st.sampled_from([1, 2, 3, 5, 8]))
def test_needed_blocks_are_read_and_delivered_once(seed: int, together: bool, where: Path, limit: int) -> None:
    chance = random.Random(seed)
    pool = BlockPool(limit=limit)
    with tempfile.TemporaryDirectory(dir=where) as folder, recorded_reads() as reads:
        root = Path(folder)
        made = {f"file-{number}": random_file(root / f"file-{number}", chance, uniform=chance.random() < 0.2)
                for number in range(chance.choice([1, 1, 3]))}  # fmt: skip
        files: dict[str, CheckpointFile] = {}
        with Reader(root, pool) as reader:
            read_before: set[tuple[str, int]] = set()
            for name, (content, entry) in made.items():
                file = files[name] = reader.open(name, entry)
                file.only_targets = chance.random() < 0.6
                file.shared = together and not file.only_targets and chance.random() < 0.5
                for _ in range(chance.choice([0, 0, 1, 6])):  # headers and directories
                    start, stop = sorted(chance.choices(range(len(content) + 1), k=2))
                    assert file.read(start, stop) == content[start:stop]
                file.targets += random_targets(len(content), chance, overlap=chance.random() < 0.3)
            for name, offset, _ in reads:
                read_before.add((name, files[name].edges.index(offset)))
            kept = {key for key in read_before if key in reader._kept}
            assert len(reader._kept) == len(kept) <= min(4, limit // 2)
            del reads[:]
            read = [0]
            reader.run(
                together=ReadAlone() if together else None, progress=lambda count: read.__setitem__(0, read[0] + count)
            )
        expected = 0
        for name, (content, entry) in made.items():
            assert all_delivered(content, files[name].targets)
            needed = needed_blocks(entry, files[name].targets, only_targets=files[name].only_targets)
            needed -= {index for of, index in kept if of == name and not files[name].shared}
            edges = entry.edges(BLOCK_BYTES)
            needed_bytes = sum(edges[index + 1] - edges[index] for index in needed)
            assert sum(done for of, _, done in reads if of == name) == needed_bytes, "nothing else, and nothing twice"
            assert len([None for of, _, _ in reads if of == name]) <= len(needed)
            expected += needed_bytes
        expected += sum(made[of][1].edges(BLOCK_BYTES)[index + 1] - made[of][1].edges(BLOCK_BYTES)[index]
                        for of, index in kept if not files[of].shared)  # fmt: skip
        assert read[0] == expected, "progress counts every byte once"
    assert pool.made == pool.ready


@settings(max_examples=2000 if SOAK else 100)
@given(st.integers(0, 2**63), st.sampled_from([1, 2, 8]), st.booleans())
def test_damage_in_needed_blocks_is_found(seed: int, limit: int, truncated: bool) -> None:
    chance = random.Random(seed)
    pool = BlockPool(limit=limit)
    with tempfile.TemporaryDirectory(dir=FOLDERS[-1]) as name:
        path = Path(name) / "file"
        content, entry = random_file(path, chance)
        if not content:
            return
        targets = random_targets(len(content), chance, overlap=chance.random() < 0.5)
        only_targets = chance.random() < 0.7
        with Reader(path.parent, pool) as reader:
            file = reader.open("file", entry)
            file.targets, file.only_targets = targets, only_targets
            at = chance.randrange(len(content))
            edges = entry.edges(BLOCK_BYTES)
            if truncated:  # after the reader opened it
                path.write_bytes(content[:at])
                bad = {index for index in range(len(entry.blocks)) if edges[index + 1] > at}
            else:
                path.write_bytes(content[:at] + bytes([content[at] ^ 1 << chance.randrange(8)]) + content[at + 1 :])
                bad = {index for index in range(len(entry.blocks)) if edges[index] <= at < edges[index + 1]}
            if chance.random() < 0.3:
                start, stop = sorted(chance.choices(range(len(content) + 1), k=2))
                touched = {
                    index for index in range(len(entry.blocks)) if edges[index] < stop and edges[index + 1] > start
                }
                if start < stop and touched & bad:
                    with pytest.raises(InvalidCheckpoint, match=r"damaged|ends at byte"):
                        file.read(start, stop)
            if needed_blocks(entry, targets, only_targets=only_targets) & bad:
                with pytest.raises(InvalidCheckpoint, match=r"damaged|ends at byte"):
                    reader.run()
            else:
                reader.run()
                assert all_delivered(content, targets)
    assert pool.made == pool.ready


def test_copies_off_a_damaged_block_end_before_its_memory_is_reused(tmp_path: Path) -> None:
    """A device may still read from it."""
    content, entry = random_file(tmp_path / "file", random.Random(3))
    (tmp_path / "file").write_bytes(content[:5] + b"?" + content[6:])
    destination = CountingDestination(len(content), asynchronous=True)
    with Reader(tmp_path, BlockPool()) as reader:
        reader.open("file", entry).targets.append(Target(0, len(content), destination))
        with pytest.raises(InvalidCheckpoint, match="damaged"):
            reader.run()
    assert destination._pending == []


def test_a_failing_destination_leaks_no_blocks(tmp_path: Path) -> None:
    content, entry = random_file(tmp_path / "file", random.Random(3))

    class Broken(CountingDestination):
        def put(self, block: Block, at: int, start: int, stop: int) -> None:
            raise RuntimeError("no room on the device")

    pool = BlockPool(limit=2)
    for asynchronous in (False, True):
        with Reader(tmp_path, pool) as reader:
            file = reader.open("file", entry)
            file.read(0, 1)
            file.targets.append(Target(0, len(content), Broken(len(content), asynchronous=asynchronous)))
            with pytest.raises(RuntimeError, match="no room"):
                reader.run()
        assert pool.made == pool.ready
