"""Files divided among ranks: every page has one writer, loads are even, and few bytes are exchanged."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from reprieve.checkpoint.buffers.block_pool import BLOCK_BYTES
from reprieve.checkpoint.format.layout import Deferred, FileLayout, Segment
from reprieve.checkpoint.format.safetensors_layout import layout_safetensors
from reprieve.checkpoint.format.torch_layout import layout_torch
from reprieve.checkpoint.io.partition import FileShare, blocks_needed, partition_files
from reprieve.checkpoint.save import page_exchange
from reprieve.storage.disk import PAGE
from tests.support.fake_ranks import Range, Shape, as_rank, not_covered, owners_of, shapes, spread

pytestmark = pytest.mark.soak

MB = 10**6


@st.composite
def saves(draw: st.DrawFn) -> tuple[int, list[Shape]]:
    world_size = draw(st.integers(1, 8))
    count = draw(st.integers(1, 4))
    large = draw(st.sampled_from([9 * PAGE, 5 * 2**20, 20 * 2**20]))
    files = [draw(shapes(world_size, f"file {number}", large=large)) for number in range(count)]
    for file in files:
        file.is_shared = draw(st.sampled_from([True, True, True, False]))
    return world_size, files


def partition_on_all_ranks(files: list[Shape], world_size: int) -> list[list[FileShare]]:
    """Return the shares by rank and file."""
    return [partition_files([file.layout(rank) for file in files], rank, world_size) for rank in range(world_size)]


@given(saves())
def test_every_byte_has_one_writer_on_which_all_ranks_agree(save: tuple[int, list[Shape]]) -> None:
    world_size, files = save
    for of_file in zip(*partition_on_all_ranks(files, world_size), strict=True):
        layout = of_file[0].layout
        for rank, part in enumerate(of_file):
            at = 0
            for piece in part.ranges:
                assert piece.start == at and piece.start % PAGE == 0
                assert 0 < piece.stop - piece.start <= BLOCK_BYTES
                assert 0 <= piece.owner < world_size
                at = piece.stop
            assert at == layout.size
            assert part.own_ranges == [piece for piece in part.ranges if piece.owner == part.rank]
            assert part.rank == rank
            if not layout.is_shared:
                assert part.own_ranges == part.ranges
                assert not any(piece.late for piece in part.ranges)
        if layout.is_shared:
            assert all(part.ranges == of_file[0].ranges for part in of_file)
            assert sum(part.writes_end for part in of_file) == 1
            assert sum(part.creates_file for part in of_file) == 1


@given(saves())
def test_a_writer_receives_what_it_does_not_hold_once(save: tuple[int, list[Shape]]) -> None:
    world_size, files = save
    by_rank = partition_on_all_ranks(files, world_size)
    sent = [
        [
            (edge.part.layout.name, edge.start, edge.stop, edge.sender, edge.owner)
            for edge in page_exchange.shared_page_ranges(parts)
        ]
        for parts in by_rank
    ]
    assert all(these == sent[0] for these in sent), "all ranks expect the same messages"
    for part in by_rank[0]:
        if not part.layout.is_shared:
            continue
        arriving = [Range(start, stop) for name, start, stop, _, _ in sent[0] if name == part.layout.name]
        needed = _needed(part)
        assert sum(item.stop - item.start for item in arriving) == sum(item.stop - item.start for item in needed), (
            "nothing twice, nothing unneeded"
        )
        for item in needed:
            assert not_covered(item.start, item.stop, arriving) == []
    for edge in page_exchange.shared_page_ranges(by_rank[0]):
        holders = edge.segment.holders
        assert holders is not None and edge.sender in holders and edge.owner not in holders
        (piece,) = [piece for piece in edge.part.ranges if piece.start <= edge.start and edge.stop <= piece.stop]
        assert piece.owner == edge.owner


def _needed(part: FileShare) -> list[Range]:
    """Return the bytes whose writer does not hold them."""
    return [
        Range(max(piece.start, segment.offset), min(piece.stop, segment.offset + segment.length))
        for segment in part.layout.segments
        if isinstance(segment, Segment) and segment.holders is not None
        for piece in part.ranges
        if piece.start < segment.offset + segment.length and piece.stop > segment.offset
        if piece.owner not in segment.holders
    ]


@given(saves())
def test_what_depends_on_crcs_of_other_ranks_is_late(save: tuple[int, list[Shape]]) -> None:
    world_size, files = save
    for part in partition_on_all_ranks(files, world_size)[0]:
        layout = part.layout
        if not layout.is_shared:
            continue
        waits = []
        for segment in layout.segments:
            if not isinstance(segment, Deferred):
                continue
            writers = owners_of(part, segment)
            for other in layout.segments:
                if isinstance(other, Segment) and other.crc >= 0 and segment.needs in (None, other.crc):
                    writers |= owners_of(part, other)
            if len(writers) > 1:
                waits.append(segment)
        for segment in waits:
            for piece in part.ranges:
                if piece.start < segment.offset + segment.length and piece.stop > segment.offset:
                    assert piece.late
        pages = sum(-(-segment.length // PAGE) + 1 for segment in layout.segments if isinstance(segment, Deferred))
        late = [piece for piece in part.ranges if piece.late]
        assert sum(piece.stop - piece.start for piece in late) <= pages * PAGE, "and little else"
        if len({piece.owner for piece in part.ranges}) == 1:
            assert late == []


@given(saves())
def test_blocks_needed_counts_the_blocks_that_the_writer_uses(save: tuple[int, list[Shape]]) -> None:
    world_size, files = save
    for parts in partition_on_all_ranks(files, world_size):
        used: list[int] = []
        for piece in (piece for part in parts for piece in part.own_ranges if not piece.late):
            pages = -(-(piece.stop - piece.start) // PAGE)
            if not used or (used[-1] + pages) * PAGE > BLOCK_BYTES:
                used.append(0)
            used[-1] += pages
        assert blocks_needed(parts) == len(used)


# Balance


def bytes_per_rank(files: list[FileLayout], world_size: int) -> list[int]:
    parts = partition_files(files, 0, world_size)
    written = [0] * world_size
    for part in parts:
        for piece in part.ranges:
            written[piece.owner] += piece.stop - piece.start
    return written


def excess(written: list[int]) -> float:
    """Return how much more than the mean the busiest rank writes, as a fraction."""
    mean = sum(written) / len(written)
    return (max(written) - mean) / mean


@given(
    st.integers(2, 8),
    st.lists(st.integers(1, 100_000) | st.integers(1, 20 * MB), min_size=1, max_size=40),
    st.booleans(),
    st.integers(1, 3),
    st.data(),
)
def test_replicas_write_equally_much(
    world_size: int, lengths: list[int], zipped: bool, count: int, data: st.DataObject
) -> None:
    """Also if only rank 0 holds some bytes, as long as these are less than a rank's share."""
    missing = 64 * MB - count * sum(lengths)
    lengths = [*lengths, *([missing // count + 1] if missing > 0 else [])]
    of_rank_0 = data.draw(st.lists(st.integers(1, 2 * MB // count), max_size=3))
    files = []
    for number in range(count):
        stretches: list[tuple[int, tuple[int, ...] | None]] = [(length, None) for length in lengths]
        for length in of_rank_0:
            stretches.insert(data.draw(st.integers(0, len(stretches))), (length, (0,)))
        files.append(Shape(f"file {number}", [[item] for item in stretches], zipped=zipped).layout(0))
    assert excess(bytes_per_rank(files, world_size)) <= 0.02


def test_buffers_of_rank_0_are_balanced_if_they_come_last() -> None:
    """As in a network of narrow layers with running statistics."""
    record: list[tuple[int, tuple[int, ...] | None]] = []
    for _ in range(2000):
        record += [(30_000, None), (512, (0,)), (5_000, None)]
    file = Shape("file", [record]).layout(0)
    assert file.size > 64 * MB
    buffers_last = Shape("file", [sorted(record, key=lambda item: item[1] is not None)]).layout(0)
    assert excess(bytes_per_rank([buffers_last], 8)) <= 0.02, "this is why the engine puts buffers last"


# Real models


def llama(width: int = 4096, inner: int = 11008, layers: int = 32, vocabulary: int = 32000) -> dict[str, torch.Size]:
    sizes = {"embed": (vocabulary, width), "norm": (width,), "head": (vocabulary, width)}
    for number in range(layers):
        sizes |= {f"{number}.{name}": (width, width) for name in "qkvo"}
        sizes |= {f"{number}.gate": (inner, width), f"{number}.up": (inner, width), f"{number}.down": (width, inner)}
        sizes |= {f"{number}.norm1": (width,), f"{number}.norm2": (width,)}
    return {name: torch.Size(size) for name, size in sizes.items()}


def lora(rank: int, width: int = 4096, layers: int = 32) -> dict[str, torch.Size]:
    """Adapters for q and v."""
    sizes = {}
    for number in range(layers):
        for name in "qv":
            sizes[f"{number}.{name}.A"] = torch.Size((rank, width))
            sizes[f"{number}.{name}.B"] = torch.Size((width, rank))
    return sizes


def resnet() -> dict[str, torch.Size]:
    """The parameters of ResNet-50."""
    sizes = {
        "conv1": (64, 3, 7, 7),
        "bn1.weight": (64,),
        "bn1.bias": (64,),
        "fc.weight": (1000, 2048),
        "fc.bias": (1000,),
    }
    into = 64
    for stage, (inner, blocks) in enumerate([(64, 3), (128, 4), (256, 6), (512, 3)]):
        for block in range(blocks):
            name = f"{stage}.{block}"
            sizes |= {f"{name}.1": (inner, into, 1, 1), f"{name}.2": (inner, inner, 3, 3)}
            sizes |= {f"{name}.3": (4 * inner, inner, 1, 1)}
            for number, width in enumerate((inner, inner, 4 * inner)):
                sizes |= {f"{name}.bn{number}.weight": (width,), f"{name}.bn{number}.bias": (width,)}
            into = 4 * inner
    return {name: torch.Size(size) for name, size in sizes.items()}


def files_of(
    sizes: dict[str, torch.Size], wrap: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype = torch.bfloat16
) -> list[FileLayout]:
    """Lay out a model and its AdamW. Every tensor is a single expanded number, so it takes no memory."""
    weights = {name: wrap(torch.zeros((), dtype=dtype).expand(size)) for name, size in sizes.items()}
    state = {
        number: {
            "step": torch.tensor(1.0),
            "exp_avg": wrap(torch.zeros(()).expand(size)),
            "exp_avg_sq": wrap(torch.zeros(()).expand(size)),
        }
        for number, size in enumerate(sizes.values())
    }
    model = layout_safetensors("model", weights, shard_bytes=50 * 10**9)
    optimizer = layout_torch("optimizer.pt", {"state": state, "param_groups": []}, is_shared=True)
    for layout in model:
        layout.is_shared = layout.name.endswith(".safetensors")
    return [*model, optimizer]


def fraction_sent(parts: list[FileShare]) -> float:
    """Return the fraction of all bytes that ranks send to each other."""
    sent = sum(edge.stop - edge.start for edge in page_exchange.shared_page_ranges(parts))
    return sent / sum(part.layout.size for part in parts)


@pytest.mark.parametrize(
    ("sizes", "replicas", "most"),
    [(llama(), 1, 0.001), (llama(), 2, 0.001), (llama(512, 1376, 8, 5003), 1, 0.01), (resnet(), 1, 0.05)],
    ids=["Llama-7B", "Llama-7B, HSDP", "a small Llama", "ResNet-50"],
)
def test_each_rank_writes_its_own_shards(sizes: dict[str, torch.Size], replicas: int, most: float) -> None:
    with as_rank(0, 8):
        files = files_of(sizes, lambda tensor: spread(tensor, 0, replicas=replicas))
    parts = partition_files(files, 0, 8)
    assert fraction_sent(parts) < most
    assert excess(bytes_per_rank(files, 8)) < 0.02
    tensors = 3 * len(sizes)
    blocks = sum(part.layout.size for part in parts) / BLOCK_BYTES
    assert sum(len(part.ranges) for part in parts) < blocks + tensors * 8 * 3, "a few for each shard"


@pytest.mark.parametrize("world_size", [3, 8])
def test_a_rank_reads_its_shards_without_those_of_other_ranks(world_size: int) -> None:
    """Blocks are verified as a whole: a rank that needs one byte of a block reads all of it."""
    with as_rank(0, world_size):
        files = files_of(llama(512, 1376, 8, 5003), lambda tensor: spread(tensor, 0))
    for rank in range(world_size):
        needed = read = 0
        for part in partition_files(files, 0, world_size):
            own = [item for item in part.layout.segments if isinstance(item, Segment) and item.holders == (rank,)]
            number = 0
            needed += sum(segment.length for segment in own)
            for piece in part.ranges:
                while number < len(own) and own[number].offset + own[number].length <= piece.start:
                    number += 1
                if number < len(own) and own[number].offset < piece.stop:
                    read += piece.stop - piece.start
        assert needed <= read < 1.02 * needed


@pytest.mark.parametrize("rank", [8, 16, 64])
def test_shards_of_adapters(rank: int) -> None:
    """Adapters are the smallest tensors worth sharding: a shard is a few pages."""
    with as_rank(0, 8):
        files = files_of(lora(rank), lambda tensor: spread(tensor, 0), torch.float32)
    assert fraction_sent(partition_files(files, 0, 8)) < 0.01


def test_replicas_of_a_real_model() -> None:
    files = files_of(resnet(), lambda tensor: tensor.contiguous(), torch.float32)
    for world_size in (2, 3, 8):
        parts = partition_files(files, 0, world_size)
        assert excess(bytes_per_rank(files, world_size)) < 0.001
        assert fraction_sent(parts) == 0
        assert sum(len(part.ranges) for part in parts) < 20 + 4 * world_size + 300 / 16


def test_ten_thousand_tensors() -> None:
    """80,000 shards. A save has seconds, of which this may take a small part."""
    record = [[(200_000 + 64 * rank, (rank,)) for rank in range(8)] for _ in range(10_000)]
    files = [Shape("file", record, zipped=True).layout(0)]
    started = time.process_time()
    parts = partition_files(files, 0, 8)
    partition_s = time.process_time() - started
    started = time.process_time()
    page_exchange.senders(parts, 0)
    blocks_needed(parts)
    assert sum(piece.stop - piece.start for part in parts for piece in part.own_ranges)
    use_s = time.process_time() - started
    assert partition_s < 2, f"{partition_s:.2f} s"
    assert use_s < 2, f"{use_s:.2f} s"
