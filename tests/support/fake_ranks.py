"""Several ranks in one process: layouts of files that they share, and real DTensors without communication."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import strategies as st

from reprieve.checkpoint.buffers.block_pool import Block
from reprieve.checkpoint.format.layout import BytesSource, Deferred, FileLayout, LayoutBuilder, Segment, Source
from reprieve.checkpoint.io.partition import FileShare
from reprieve.storage.disk import PAGE

Holders = tuple[int, ...] | None


class NoBytes:
    """A source that must not be copied from."""

    def copy(self, block: Block, at: int, start: int, stop: int) -> None:
        raise AssertionError("nothing should be copied")


@dataclass(slots=True)
class Shape:
    """A file as all ranks know it: stretches of bytes, the ranks that hold each, and records with or without a CRC."""

    name: str
    records: list[list[tuple[int, Holders]]] = field(default_factory=list)
    zipped: bool = False
    """Every record gets a header, and its CRC after it; all CRCs are repeated at the end."""
    is_shared: bool = True

    others_lie: bool = False
    """Ranks that do not hold bytes have other bytes in their place, like DDP's buffers; otherwise none, like ranks
    without a shard."""

    def layout(self, rank: int | None, content: bytes | None = None) -> FileLayout:
        """Return the layout as a rank sees it, or (None) as a process that holds everything. `content`: the file's
        bytes, except headers and CRCs."""
        builder = LayoutBuilder(self.name)
        for record in self.records:
            crc = builder.new_crc() if self.zipped else -1
            if self.zipped:
                builder.add_bytes(b"header of a record")
            for length, holders in record:
                source: Source | None = NoBytes()
                if holders is not None and rank is not None and rank not in holders:
                    source = BytesSource(b"?" * length) if self.others_lie and content is not None else None
                elif content is not None:
                    source = BytesSource(content[builder.size : builder.size + length])
                holding_ranks = None if rank is None else holders
                builder.add_source(source, length, crc=crc, label="some tensor", holders=holding_ranks)
            if self.zipped:
                builder.add_deferred(8, lambda crcs, crc=crc: b"CRC " + crcs[crc].to_bytes(4, "big"), needs=crc)
        if self.zipped:
            count = len(self.records)
            builder.add_deferred(
                4 * count + 3, lambda crcs: b"all" + b"".join(crc.to_bytes(4, "big") for crc in crcs), needs=None
            )
            builder.add_bytes(b"end")
        layout = builder.build()
        layout.is_shared = self.is_shared and rank is not None
        return layout


@st.composite
def holders(draw: st.DrawFn, world_size: int) -> Holders:
    ranks = st.integers(0, world_size - 1)
    several = st.lists(ranks, min_size=1, max_size=world_size, unique=True).map(lambda some: tuple(sorted(some)))
    return draw(st.none() | ranks.map(lambda rank: (rank,)) | several | st.just((0,)))


@st.composite
def shapes(draw: st.DrawFn, world_size: int, name: str = "file", *, large: int = 5 * 2**20) -> Shape:
    """Draw stretches of a byte to several MiB that end at, before and after the ends of pages."""
    shape = Shape(name, zipped=draw(st.booleans()), others_lie=draw(st.booleans()))
    size = 0
    for _ in range(draw(st.sampled_from([0, 1, 2, 5, 12]))):
        record: list[tuple[int, Holders]] = []
        for _ in range(draw(st.integers(0, 4))):
            length = draw(st.integers(1, 40) | st.integers(1, 3 * PAGE) | st.integers(1, large) | st.just(large))
            if draw(st.booleans()):  # near the end of a page
                length += -(size + length) % PAGE + draw(st.integers(-1, 1))
            length = max(1, length)
            record.append((length, draw(holders(world_size))))
            size += length
        shape.records.append(record)
    return shape


@dataclass(frozen=True, slots=True)
class Range:
    start: int
    stop: int


def not_covered(start: int, stop: int, ranges: Sequence[Range]) -> list[Range]:
    """Return what of [start, stop) the ranges do not cover."""
    gaps = []
    for covered in sorted(ranges, key=lambda covered: covered.start):
        if covered.start > start:
            gaps.append(Range(start, min(covered.start, stop)))
        start = max(start, covered.stop)
    if start < stop:
        gaps.append(Range(start, stop))
    return [gap for gap in gaps if gap.start < gap.stop]


def owners_of(part: FileShare, segment: Segment | Deferred) -> set[int]:
    """Return the ranks that write some byte of a segment, in a slow and simple way."""
    stop = segment.offset + segment.length
    return {piece.owner for piece in part.ranges if piece.start < stop and piece.stop > segment.offset}


# Tensors that are spread over ranks


@contextlib.contextmanager
def as_rank(rank: int, world_size: int) -> Iterator[None]:
    """Let this process be one of several ranks for torch; communication with the others does nothing."""
    from torch.distributed.tensor import DTensor, debug
    from torch.testing._internal.distributed.fake_pg import FakeStore

    # DTensor caches operations by mesh. A mesh knows its rank, but compares equal to that of other ranks.
    if hasattr(debug, "_clear_sharding_prop_cache"):
        debug._clear_sharding_prop_cache()
    else:  # torch 2.6
        DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache.cache_clear()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def spread(whole: torch.Tensor, rank: int, *, replicas: int = 1) -> torch.Tensor:
    """Return the rank's shard of a tensor, as `fully_shard` would make it; with `replicas`, as HSDP would."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    count = dist.get_world_size() // replicas
    mesh = _mesh(replicas, count, rank)
    size = -(-whole.shape[0] // count)
    local = whole[rank % count * size : (rank % count + 1) * size]
    return DTensor.from_local(
        local, mesh, [Replicate(), Shard(0)], run_check=False, shape=whole.shape, stride=_row_major(whole.shape)
    )


@functools.cache
def _mesh(replicas: int, count: int, _rank: int) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (replicas, count))


def _row_major(shape: Sequence[int]) -> tuple[int, ...]:
    sizes = itertools.accumulate(reversed(list(shape)[1:]), lambda product, size: product * size, initial=1)
    return tuple(reversed(list(sizes)))
