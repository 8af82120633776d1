"""Bytes that one rank holds and another one writes: the ends of shards in a page that they share.

A disk's page has one writer, so the others give it theirs: before the first page is sealed, each rank hands every
other one bundle with all that it needs, in an order that both know (`division` is the same on all ranks).
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
    for part in parts:
        if not part.layout.by_all:
            continue
        pieces, number = part.pieces, 0
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
    """What this rank has to give to each other rank. Read from the live state: before training goes on."""
    bundles: dict[int, list[bytes]] = {}
    edges = [edge for edge in shared_page_ranges(parts) if edge.sender == rank]
    if not edges:
        return {}
    block = pool.take()
    assert block is not None
    try:
        with CopyStreams(devices_of(part.layout for part in parts)) as streams:
            for edge in edges:
                for start in range(edge.start, edge.stop, BLOCK_BYTES):
                    stop = min(start + BLOCK_BYTES, edge.stop)
                    assert edge.segment.source is not None
                    edge.segment.source.copy(block, 0, start - edge.segment.offset, stop - edge.segment.offset)
                    streams.wait()
                    bundles.setdefault(edge.owner, []).append(bytes(block.view[: stop - start]))
    finally:
        pool.give(block)
    return {owner: b"".join(bundle) for owner, bundle in bundles.items()}


def senders(parts: Sequence[FileShare], rank: int) -> list[int]:
    """The ranks that have something for this one."""
    return sorted({edge.sender for edge in shared_page_ranges(parts) if edge.owner == rank})


def incoming(parts: Sequence[FileShare], rank: int, bundles: Mapping[int, bytes]) -> dict[str, list[tuple[int, bytes]]]:
    """What other ranks gave: by file, offsets and the bytes there, in order."""
    used = dict.fromkeys(bundles, 0)
    out: dict[str, list[tuple[int, bytes]]] = {}
    for edge in shared_page_ranges(parts):
        if edge.owner == rank:
            at, size = used[edge.sender], edge.stop - edge.start
            out.setdefault(edge.part.layout.name, []).append((edge.start, bundles[edge.sender][at : at + size]))
            used[edge.sender] = at + size
    return out
