"""Exchanges the ends of shards that share a page: one rank holds the bytes, another one writes the page.

A page of a disk has a single writer, so the other ranks send it their bytes. Before the first page is sealed, each rank
sends every other one a single bundle with all that it needs, in an order that both know (`partition` computes the same
on all ranks).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from reprieve.checkpoint.buffers.block_pool import BLOCK_BYTES, BlockPool
from reprieve.checkpoint.buffers.cuda_streams import CopyStreams
from reprieve.checkpoint.format.layout import Segment, devices_of
from reprieve.checkpoint.io.partition import FileShare


class SharedPageRange(NamedTuple):
    """Bytes [start, stop) of a file: `sender` holds them, `owner` writes them."""

    part: FileShare
    segment: Segment
    start: int
    stop: int
    sender: int
    owner: int


def shared_page_ranges(parts: Sequence[FileShare]) -> Iterator[SharedPageRange]:
    """Every range that another rank writes than the one that holds it, in the same order on all ranks."""
    for part in parts:
        if not part.layout.is_shared:
            continue
        pieces, number = part.ranges, 0
        for segment in part.layout.segments:
            if not isinstance(segment, Segment) or segment.holders is None:
                continue
            start, end = segment.offset, segment.offset + segment.length
            while pieces[number].stop <= start:
                number += 1
            while start < end:
                _, stop, owner, _ = pieces[number]
                if owner not in segment.holders:
                    yield SharedPageRange(part, segment, start, min(stop, end), segment.holders[0], owner)
                start = stop
                number += stop < end


def outgoing(parts: Sequence[FileShare], rank: int, pool: BlockPool) -> dict[int, bytes]:
    """The bundle for each rank that writes bytes of this one. It is read from the live state, before training
    continues."""
    bundles: dict[int, list[bytes]] = {}
    ranges = [shared for shared in shared_page_ranges(parts) if shared.sender == rank]
    if not ranges:
        return {}
    block = pool.take()
    assert block is not None
    try:
        with CopyStreams(devices_of(part.layout for part in parts)) as streams:
            for shared in ranges:
                for start in range(shared.start, shared.stop, BLOCK_BYTES):
                    stop = min(start + BLOCK_BYTES, shared.stop)
                    assert shared.segment.source is not None
                    shared.segment.source.copy(block, 0, start - shared.segment.offset, stop - shared.segment.offset)
                    streams.wait()
                    bundles.setdefault(shared.owner, []).append(bytes(block.view[: stop - start]))
    finally:
        pool.give(block)
    return {owner: b"".join(bundle) for owner, bundle in bundles.items()}


def senders(parts: Sequence[FileShare], rank: int) -> list[int]:
    """The ranks that send this one a bundle."""
    return sorted({shared.sender for shared in shared_page_ranges(parts) if shared.owner == rank})


def incoming(parts: Sequence[FileShare], rank: int, bundles: Mapping[int, bytes]) -> dict[str, list[tuple[int, bytes]]]:
    """The received bytes by file, each with its offset, in order."""
    used = dict.fromkeys(bundles, 0)
    out: dict[str, list[tuple[int, bytes]]] = {}
    for shared in shared_page_ranges(parts):
        if shared.owner == rank:
            at, size = used[shared.sender], shared.stop - shared.start
            out.setdefault(shared.part.layout.name, []).append((shared.start, bundles[shared.sender][at : at + size]))
            used[shared.sender] = at + size
    return out
