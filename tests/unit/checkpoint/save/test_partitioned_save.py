"""Several ranks write one file: byte for byte what a single rank writes, in whatever order they come."""

from __future__ import annotations

import contextlib
import copy
import errno
import itertools
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn

from reprieve.checkpoint.buffers.block_pool import BLOCK_BYTES, Block, BlockPool
from reprieve.checkpoint.format.manifest import MANIFEST, FileEntry
from reprieve.checkpoint.io import partition
from reprieve.checkpoint.io.partition import FileShare, blocks_needed, partition_files
from reprieve.checkpoint.io.reader import Reader, Target
from reprieve.checkpoint.io.writer import Crcs, Writer
from reprieve.checkpoint.save import page_exchange
from reprieve.checkpoint.save.job import _entry
from reprieve.checkpoint.save.plan import plan
from reprieve.checkpoint.state.state import State
from reprieve.errors import InvalidCheckpoint, StateError
from reprieve.storage.disk import PAGE, Disk, OpenFile
from tests.support.fake_ranks import Holders, Shape, as_rank, shapes, spread
from tests.support.helpers import SOAK, FailingDisk, assert_same, manifest, pool
from tests.support.places import ROOT

pytestmark = pytest.mark.soak

FOLDERS = [Path(folder) for folder in (tempfile.gettempdir(), "/dev/shm") if Path(folder).is_dir()]
"""One that takes direct I/O, most likely, and one that does not."""


class Unflushed(Disk):
    """Everything but the wait for the medium, which other tests cover."""

    def flush(self, file: OpenFile) -> None:
        pass


@contextlib.contextmanager
def folder(where: Path = FOLDERS[-1]) -> Iterator[Path]:
    root = Path(tempfile.mkdtemp(prefix="split-", dir=where))
    try:
        yield root
    finally:
        shutil.rmtree(root)


@contextlib.contextmanager
def small_pieces(share: int = PAGE, block: int = 16 * PAGE) -> Iterator[None]:
    """Makes things that usually take megabytes happen within a few pages."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(partition, "_MIN_SHARE_BYTES", share)
        patch.setattr(partition, "BLOCK_BYTES", block)
        yield


def write_together(
    root: Path,
    by_rank: Sequence[Sequence[FileShare]],
    chance: random.Random,
    *,
    staged: Sequence[bool] | None = None,
    pools: Sequence[BlockPool] | None = None,
    disk: Disk | None = None,
    after_staging: Callable[[], None] = lambda: None,
) -> dict[str, FileEntry]:
    """All ranks, in any order in which their steps may happen."""
    ranks = list(range(len(by_rank)))
    pools = pools or [BlockPool() for _ in ranks]
    writers = [Writer(disk or Unflushed(), pools[rank], root, by_rank[rank]) for rank in ranks]
    with contextlib.ExitStack() as stack:
        for writer in writers:
            stack.enter_context(writer)
        writers[0].create()
        messages: dict[tuple[int, int], bytes] = {}
        for rank in shuffled(ranks, chance):
            for to, bundle in page_exchange.outgoing(by_rank[rank], rank, pools[rank]).items():
                messages[rank, to] = bundle
            if staged is not None and staged[rank]:
                writers[rank].stage()
        after_staging()
        crcs: dict[str, Crcs] = {}
        for rank in shuffled(ranks, chance):
            writers[rank].create()
            received = {sender: messages.pop((sender, rank)) for sender in page_exchange.senders(by_rank[rank], rank)}
            written = writers[rank].write(page_exchange.incoming(by_rank[rank], rank, received))
            for name, known in written.items():
                for number, stretches in known.items():
                    crcs.setdefault(name, {}).setdefault(number, []).extend(stretches)
        assert not messages, "every message was received"
        digests: dict[str, tuple[int, dict[int, str]]] = {}
        for rank in shuffled(ranks, chance):
            for part, known_blocks in zip(by_rank[rank], writers[rank].complete(crcs).values(), strict=True):
                digests.setdefault(part.layout.name, (part.layout.size, {}))[1].update(known_blocks)
    return {name: _entry(size, blocks, BLOCK_BYTES) for name, (size, blocks) in digests.items()}


def shuffled(ranks: Sequence[int], chance: random.Random) -> list[int]:
    return chance.sample(ranks, len(ranks))


def first_difference(first: Path, other: Path) -> str | None:
    """pytest would take minutes to explain the difference of two megabytes."""
    a, b = first.read_bytes(), other.read_bytes()
    if a == b:
        return None
    if len(a) != len(b):
        return f"{first.name}: {len(a)} and {len(b)} bytes"
    at = next(at for at in range(len(a)) if a[at] != b[at])
    return f"{first.name}: differs at {at} (page {at // PAGE} + {at % PAGE}): {a[at : at + 20]!r}, {b[at : at + 20]!r}"


def verify(root: Path, entries: dict[str, FileEntry]) -> None:
    """Every byte, through the reader."""
    for name, entry in entries.items():
        entry._check(name, BLOCK_BYTES)
    with Reader(root, pool) as reader:
        for name, entry in entries.items():
            reader.open(name, entry)
        reader.run()


def returned(pools: Sequence[BlockPool]) -> bool:
    return all(pool.made == pool.ready for pool in pools)


# Files of any shape


@settings(max_examples=400 if SOAK else 40)
@given(st.data(), st.integers(1, 8), st.integers(0, 2**32), st.sampled_from(FOLDERS))
def test_the_bytes_are_those_of_one_writer(data: st.DataObject, world_size: int, seed: int, where: Path) -> None:
    chance = random.Random(seed)
    count = data.draw(st.integers(1, 3))
    files = [data.draw(shapes(world_size, f"file-{number}", large=40 * PAGE)) for number in range(count)]
    contents = [chance.randbytes(file.layout(None).size) for file in files]
    limits = [chance.choice([1, 2, 8]) for _ in range(world_size)]
    pools = [BlockPool(limit=limit) for limit in limits]
    with folder(where) as root, small_pieces(block=chance.choice([PAGE, 3 * PAGE, 64 * PAGE, BLOCK_BYTES])):
        by_rank = [
            partition_files(
                [file.layout(rank, content) for file, content in zip(files, contents, strict=True)], rank, world_size
            )
            for rank in range(world_size)
        ]
        staged = [chance.random() < 0.5 and blocks_needed(by_rank[rank]) <= limits[rank] for rank in range(world_size)]
        (root / "together").mkdir()
        (root / "alone").mkdir()
        entries = write_together(root / "together", by_rank, chance, staged=staged, pools=pools)
        alone = [file.layout(None, content) for file, content in zip(files, contents, strict=True)]
        Writer(Unflushed(), pool, root / "alone", alone).write_through()
        for file in files:
            assert first_difference(root / "together" / file.name, root / "alone" / file.name) is None
        verify(root / "together", entries)
    assert returned(pools)


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("where", FOLDERS, ids=str)
def test_megabytes_at_the_same_time(where: Path, staged: bool) -> None:
    """Full-size blocks, and ranks that really run beside each other."""
    world_size, chance = 5, random.Random(1)
    records: list[list[tuple[int, Holders]]] = [[(chance.randrange(1, 2 * 2**20), (rank,)) for rank in range(5)]]
    records += [[(chance.randrange(1, 300), None)] for _ in range(50)]
    records += [[(45 * 2**20 + 77, None)], [(20 * 2**20 + 5, (3,)), (1, (4,)), (4095, (0, 2))]]
    shape = Shape("file", records, zipped=True)
    content = chance.randbytes(shape.layout(None).size)
    by_rank = [partition_files([shape.layout(rank, content)], rank, world_size) for rank in range(world_size)]
    pools = [BlockPool(limit=8) for _ in range(world_size)]
    with folder(where) as root:
        (root / "together").mkdir()
        (root / "alone").mkdir()
        entries = together_in_threads(root / "together", by_rank, pools, staged=staged)
        Writer(Unflushed(), pool, root / "alone", [shape.layout(None, content)]).write_through()
        assert first_difference(root / "together" / "file", root / "alone" / "file") is None
        verify(root / "together", entries)
    assert returned(pools)


def together_in_threads(
    root: Path, by_rank: Sequence[Sequence[FileShare]], pools: Sequence[BlockPool], *, staged: bool
) -> dict[str, FileEntry]:
    ranks = range(len(by_rank))
    barrier = threading.Barrier(len(by_rank), timeout=100)
    messages: dict[tuple[int, int], bytes] = {}
    crcs: dict[str, Crcs] = {}
    blocks: dict[int, str] = {}
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            with Writer(Disk(), pools[rank], root, by_rank[rank]) as writer:
                writer.create()
                messages.update(
                    {(rank, to): it for to, it in page_exchange.outgoing(by_rank[rank], rank, pools[rank]).items()}
                )
                if staged:
                    writer.stage()
                barrier.wait()
                received = {sender: messages[sender, rank] for sender in page_exchange.senders(by_rank[rank], rank)}
                for name, known in writer.write(page_exchange.incoming(by_rank[rank], rank, received)).items():
                    for number, stretches in known.items():
                        crcs.setdefault(name, {}).setdefault(number, []).extend(stretches)
                barrier.wait()
                blocks.update(writer.complete(crcs)["file"])
        except BaseException as error:  # noqa: BLE001 - raised by whoever waits for the thread
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    return {"file": _entry(by_rank[0][0].layout.size, blocks, BLOCK_BYTES)}


def test_a_small_ring_and_many_late_pages() -> None:
    """Late pages wait in memory of their own: a ring of one block goes round all the same."""
    records: list[list[tuple[int, Holders]]] = [[(5000, (0,)), (5000, (1,))] for _ in range(3000)]
    records += [[(40 * 2**20, None)]]
    shape = Shape("file", records, zipped=True)
    content = random.Random(0).randbytes(shape.layout(None).size)
    by_rank = [partition_files([shape.layout(rank, content)], rank, 2) for rank in range(2)]
    assert sum(piece.late for piece in by_rank[0][0].ranges) > 2000
    pools = [BlockPool(limit=1), BlockPool(limit=1)]
    with folder() as root:
        verify(root, write_together(root, by_rank, random.Random(0), pools=pools))
    assert returned(pools)


def test_neighbouring_pieces_are_one_write() -> None:
    """Small pieces are for whoever reads; a disk that is far away takes as long for a page as for a megabyte."""
    records: list[list[tuple[int, Holders]]] = [[(30_001, (rank,)) for rank in range(2)] for _ in range(50)]
    shape = Shape("file", records)
    content = random.Random(0).randbytes(shape.layout(None).size)
    by_rank = [partition_files([shape.layout(rank, content)], rank, 2) for rank in range(2)]

    class Counted(Unflushed):
        writes = 0

        def write(self, file: OpenFile, data: memoryview, offset: int) -> None:
            self.writes += 1
            super().write(file, data, offset)

    disk = Counted()
    with folder() as root:
        verify(root, write_together(root, by_rank, random.Random(0), disk=disk))
    pieces = by_rank[0][0].ranges
    owners_change = sum(piece.owner != following.owner for piece, following in itertools.pairwise(pieces))
    assert disk.writes == owners_change + 1 < len(pieces) / 1.5


def test_as_many_blocks_as_were_foreseen_are_enough_to_stage() -> None:
    shape = Shape("file", [[(9 * 2**20, None), (9 * 2**20, (0,)), (100, (1,)), (17 * 2**20, (2,))]] * 2, zipped=True)
    content = random.Random(0).randbytes(shape.layout(None).size)
    by_rank = [partition_files([shape.layout(rank, content)], rank, 3) for rank in range(3)]
    pools = [BlockPool(limit=max(1, blocks_needed(parts))) for parts in by_rank]
    with folder() as root:
        verify(root, write_together(root, by_rank, random.Random(0), pools=pools, staged=[True] * 3))
    assert returned(pools)


@settings(max_examples=400 if SOAK else 30)
@given(st.integers(2, 4), st.integers(0, 60), st.booleans(), st.integers(0, 2**32))
def test_after_an_error_all_memory_comes_back(world_size: int, at: int, staged: bool, seed: int) -> None:
    records: list[list[tuple[int, Holders]]] = [[(5000, (rank,)) for rank in range(world_size)], [(30 * PAGE, None)]]
    files = [Shape(f"file-{number}", records, zipped=True) for number in range(2)]
    contents = [random.Random(seed).randbytes(file.layout(None).size) for file in files]
    pools = [BlockPool(limit=4) for _ in range(world_size)]
    disk = FailingDisk(at, errno.EIO)
    with folder() as root, small_pieces():
        by_rank = [
            partition_files(
                [file.layout(rank, content) for file, content in zip(files, contents, strict=True)], rank, world_size
            )
            for rank in range(world_size)
        ]
        try:
            write_together(root, by_rank, random.Random(seed), pools=pools, staged=[staged] * world_size, disk=disk)
        except OSError:
            assert disk.failed
        else:
            assert not disk.failed
    assert returned(pools)


# Real states


class Optimizer:
    """The attributes by which the engine recognises an optimizer."""

    def __init__(self, tree: dict[str, Any]) -> None:
        self.tree = tree
        self.param_groups: list[Any] = []

    def state_dict(self) -> dict[str, Any]:
        return self.tree

    def load_state_dict(self, tree: dict[str, Any]) -> None:
        raise AssertionError


SIZES = [(), (1,), (3, 5), (17, 31), (0, 4), (2, 0), (64, 64), (5, 7, 11), (1000, 33), (1023,), (4096, 16), (8, 4096)]
FLOATS = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn]


@st.composite
def states(draw: st.DrawFn) -> tuple[nn.Module, dict[str, Any]]:
    """A module with ties and buffers, and a tree as AdamW's."""
    torch.manual_seed(draw(st.integers(0, 2**32)))
    root, inner = nn.Module(), nn.Module()
    root.add_module("inner", inner)
    for number in range(draw(st.integers(1, 6))):
        size, dtype = draw(st.sampled_from(SIZES)), draw(st.sampled_from(FLOATS))
        parameter = nn.Parameter(torch.randn(size).to(dtype), requires_grad=False)
        draw(st.sampled_from([root, inner])).register_parameter(f"weight{number}", parameter)
        if draw(st.sampled_from([True, False, False])):
            inner.register_parameter(f"tied{number}", parameter)
    for number in range(draw(st.integers(0, 3))):
        root.register_buffer(f"mean{number}", torch.randn(draw(st.sampled_from(SIZES))))
        root.register_buffer(f"count{number}", torch.tensor(draw(st.integers(0, 2**40))))
    state = {
        number: {
            "step": torch.tensor(float(number)),
            "exp_avg": torch.randn(parameter.shape),
            "exp_avg_sq": torch.rand(parameter.shape),
        }
        for number, parameter in enumerate(root.parameters())
    }
    groups = [{"lr": 0.1, "betas": (0.9, 0.99), "params": list(state)}]
    return root, {"state": state, "param_groups": groups}


def replica(module: nn.Module, tree: dict[str, Any], rank: int) -> tuple[nn.Module, dict[str, Any]]:
    """As under DDP: equal parameters, and each rank's own buffers."""
    module, tree = copy.deepcopy((module, tree))
    for buffer in module.buffers():
        buffer.add_(rank)
    return module, tree


def shard(module: nn.Module, tree: dict[str, Any], rank: int, replicas: int) -> tuple[nn.Module, dict[str, Any]]:
    """As under FSDP."""
    module, tree = replica(module, tree, rank)
    spread_out: dict[int, torch.Tensor] = {}
    for part in (module, module.inner):
        for name, value in list(part._parameters.items()):
            assert value is not None
            if value.ndim:
                if id(value) not in spread_out:
                    spread_out[id(value)] = nn.Parameter(
                        spread(value.data, rank, replicas=replicas), requires_grad=False
                    )
                part._parameters[name] = spread_out[id(value)]
    for entry in tree["state"].values():
        for name in ("exp_avg", "exp_avg_sq"):
            if entry[name].ndim:
                entry[name] = spread(entry[name], rank, replicas=replicas)
    return module, tree


def parts_of(
    module: nn.Module, tree: dict[str, Any], rank: int = 0, world_size: int = 1, *, own: bool = False
) -> list[FileShare]:
    mine = {"mine": {"rank": rank}} if own else {}
    state = State({"model": module, "optimizer": Optimizer(tree), **mine})
    return plan(state, rng=False, rank=rank, world_size=world_size, shard_bytes=300_000).parts


@settings(max_examples=300 if SOAK else 25)
@given(
    states(),
    st.sampled_from([(2, 1), (3, 1), (5, 1), (8, 1), (4, 2), (6, 3)]),
    st.booleans(),
    st.booleans(),
    st.integers(0, 2**32),
)
def test_a_state_of_many_ranks_is_that_of_one(
    state: tuple[nn.Module, dict[str, Any]], ranks: tuple[int, int], sharded: bool, staged: bool, seed: int
) -> None:
    (world_size, replicas), (module, tree) = ranks, state
    want, want_tree = copy.deepcopy((dict(module.state_dict()), tree))
    by_rank, live = [], []
    with small_pieces(block=random.Random(seed).choice([3 * PAGE, BLOCK_BYTES])):
        for rank in range(world_size):
            with as_rank(rank, world_size):
                mine = shard(module, tree, rank, replicas) if sharded else replica(module, tree, rank)
                by_rank.append(parts_of(*mine, rank, world_size, own=True))
                live.append(mine)

        def train() -> None:
            """What is staged is safe from the next step."""
            for of_module, of_tree in live if staged else []:
                for value in (
                    *of_module.state_dict().values(),
                    *(v for e in of_tree["state"].values() for v in e.values()),
                ):
                    getattr(value, "_local_tensor", value).zero_()

        with folder() as root:
            (root / "together").mkdir()
            (root / "alone").mkdir()
            entries = write_together(
                root / "together", by_rank, random.Random(seed), staged=[staged] * world_size, after_staging=train
            )
            files = parts_of(module, tree)
            Writer(Unflushed(), pool, root / "alone", files).write_through()
            has_buffers = any("mean" in name for name in want)
            own = {
                f"{name}.{rank}.pt" for rank in range(world_size) for name in ["mine", *["model.buffers"] * has_buffers]
            }
            assert set(entries) == {path.name for path in (root / "alone").iterdir()} | own
            for part in files:
                name = part.layout.name
                assert first_difference(root / "together" / name, root / "alone" / name) is None
            verify(root / "together", entries)
            check_stock(root / "together", want, want_tree)
            for rank in range(world_size):
                assert torch.load(root / "together" / f"mine.{rank}.pt", weights_only=True) == {"rank": rank}
                if has_buffers:
                    buffers = torch.load(root / "together" / f"model.buffers.{rank}.pt", weights_only=True)
                    assert all(torch.equal(value, want[name] + rank) for name, value in buffers.items())


def check_stock(root: Path, want: dict[str, torch.Tensor], want_tree: dict[str, Any]) -> None:
    """Readers that know nothing of ranks."""
    with zipfile.ZipFile(root / "optimizer.pt") as archive:
        assert archive.testzip() is None
    assert_same(torch.load(root / "optimizer.pt", weights_only=True), want_tree)
    found: dict[str, torch.Tensor] = {}
    for path in root.glob("*.safetensors"):
        found |= load_file(path)
    assert found.keys() <= want.keys()
    for key, value in found.items():
        assert_same(value, want[key])
    tied = {name for name in want if name not in found}
    assert all(
        name.startswith("inner.tied") or name.startswith("inner.weight") or name.startswith("weight") for name in tied
    )


def test_shards_in_what_is_a_ranks_own() -> None:
    """No rank sends the rest of such a tensor, so the file would hold whatever was in memory there."""
    with as_rank(1, 2):
        mine = {"ema": {"w": spread(torch.ones(5, 5), 1)}}
        state = State({"model": nn.Linear(2, 2), "mine": mine})
        with pytest.raises(StateError, match=r"mine\.1\.pt: ema\.w is sharded over ranks"):
            plan(state, rng=False, rank=1, world_size=2)


# Damage


@pytest.fixture(scope="module")
def written() -> Iterator[tuple[Path, FileEntry]]:
    """A file in pieces of all sizes."""
    chance = random.Random(5)
    records: list[list[tuple[int, Holders]]] = []
    for _ in range(12):
        records.append([(chance.randrange(1, 5 * PAGE), (rank,)) for rank in range(3)])
        records.append([(chance.randrange(1, 40 * PAGE), None)])
    shape = Shape("file", records, zipped=True)
    content = chance.randbytes(shape.layout(None).size)
    with folder() as root, small_pieces(block=7 * PAGE):
        by_rank = [partition_files([shape.layout(rank, content)], rank, 3) for rank in range(3)]
        yield root, write_together(root, by_rank, chance)["file"]


def test_a_reader_made_from_the_description_alone(written: tuple[Path, FileEntry]) -> None:
    """The program in docs/format.md, on blocks of any size."""
    root, entry = written
    page = (ROOT / "docs" / "format.md").read_text()
    program = page[page.index("```python\nimport json, sys, xxhash") :].split("```")[1].removeprefix("python\n")
    (root / MANIFEST).write_bytes(manifest(files={"file": entry}).encode())
    run = partial(subprocess.run, [sys.executable, "-c", program, str(root)], capture_output=True, text=True)
    assert run().stdout.endswith("all checksums match\n")
    with flipped(root / "file", 8 * entry.bytes - 1):
        assert "AssertionError: file" in run().stderr


def test_every_flipped_bit_is_found(written: tuple[Path, FileEntry]) -> None:
    root, entry = written
    assert entry.starts is not None and len(entry.starts) > 50
    verify(root, {"file": entry})
    chance = random.Random(0)
    missed = []
    for _ in range(3000 if SOAK else 150):
        bit = chance.randrange(8 * entry.bytes)
        with flipped(root / "file", bit):
            with Reader(root, pool) as reader:
                file = reader.open("file", entry)
                if chance.random() < 0.5:  # read only what is around it
                    file.only_targets = True
                    start = chance.randrange(max(0, bit // 8 - 9000), bit // 8 + 1)
                    stop = chance.randrange(bit // 8 + 1, min(entry.bytes, bit // 8 + 9000) + 1)
                    file.targets.append(Target(start, stop - start, Nowhere()))
                try:
                    reader.run()
                except InvalidCheckpoint:
                    continue
            missed.append(bit)
    assert missed == []
    verify(root, {"file": entry})
    assert pool.made == pool.ready


class Nowhere:
    asynchronous = False

    def put(self, block: Block, at: int, start: int, stop: int) -> None:
        pass

    def finish(self) -> None:
        pass


@contextlib.contextmanager
def flipped(path: Path, bit: int) -> Iterator[None]:
    with path.open("r+b", buffering=0) as file:
        byte = os.pread(file.fileno(), 1, bit // 8)
        os.pwrite(file.fileno(), bytes([byte[0] ^ 1 << bit % 8]), bit // 8)
        yield
        os.pwrite(file.fileno(), byte, bit // 8)
