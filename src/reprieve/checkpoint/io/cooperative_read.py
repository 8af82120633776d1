"""Replicas read a checkpoint together: each reads a part from storage and receives the rest from other ranks.

In each round every rank loads one span, all ranks exchange their spans, and each rank verifies and delivers all of
them. The exchange runs over gloo between the hosts' memories, whatever backend training uses. A rank that cannot read
its span sends zeros: their checksum is wrong on every rank, so all ranks stop after the same round and none waits in a
collective. Only a rank that dies or stalls makes the others wait, at most for the group's time limit.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from reprieve.checkpoint.buffers.block_pool import Block
from reprieve.checkpoint.buffers.thread_pool import ThreadPool
from reprieve.checkpoint.io.reader import Span
from reprieve.errors import InvalidCheckpoint, RankFailed
from reprieve.ranks.group import Ranks

_GROUP = 8
"""Ranks that read together: enough that storage is no bottleneck, few enough that a round fits in 256 MiB."""
_AHEAD = 2
"""Rounds that are loaded or delivered while another round is exchanged."""


class CooperativeReader:
    """Reader of spans together with neighbouring ranks, over torch.distributed."""

    def __init__(self, ranks: Ranks, limit: timedelta) -> None:
        """Create the process groups. A collective: every rank must call it."""
        self._group: dist.ProcessGroup | None = None
        for first in range(0, ranks.world_size, _GROUP):
            members = list(range(first, min(first + _GROUP, ranks.world_size)))
            try:
                group = dist.new_group(members, timeout=limit, backend="gloo")
            except RuntimeError as error:
                raise RankFailed(None, f"a rank did not join the cooperative read of a checkpoint: {error}") from error
            if ranks.rank in members:
                self._group = group
                self._index, self._size = members.index(ranks.rank), len(members)
        # Not from a pool: a block that is on its way to another rank must not be used for anything else.
        self._blocks = [[Block(pinned=False) for _ in range(self._size)] for _ in range(_AHEAD)]
        self._loaded = [Block(pinned=False) for _ in range(_AHEAD + 1)]

    def read(self, spans: Sequence[Span], *, progress: Callable[[int], None] | None) -> None:
        """Load, exchange, verify and deliver the spans, which are the same on every rank."""
        rounds = [spans[at : at + self._size] for at in range(0, len(spans), self._size)]
        threads = ThreadPool(4, "reprieve-read")
        loads: list[Future[None]] = []
        delivered: list[list[Future[None]]] = []
        try:
            for number, round_spans in enumerate(rounds):
                while len(loads) < min(number + _AHEAD + 1, len(rounds)):
                    loads.append(threads.submit(partial(self._load, rounds[len(loads)], len(loads))))
                # Every rank checks the same rounds before the next exchange, so all ranks stop before the same one.
                if number >= _AHEAD:
                    _raise_first([*delivered[number - _AHEAD]], loads[number - _AHEAD])
                loads[number].exception()  # a rank that could not read takes part all the same
                blocks = self._exchange(round_spans, number)
                delivered.append(
                    [
                        threads.submit(partial(_deliver, span, block, progress))
                        for span, block in zip(round_spans, blocks, strict=False)
                    ]
                )
            for number, deliveries in enumerate(delivered):
                _raise_first(deliveries, loads[number])
        finally:
            threads.join()

    def close(self) -> None:
        if self._group is not None:
            with contextlib.suppress(RuntimeError, ValueError):
                dist.destroy_process_group(self._group)

    def _load(self, spans: Sequence[Span], number: int) -> None:
        if self._index >= len(spans):
            return
        block = self._loaded[number % len(self._loaded)]
        span = spans[self._index]
        try:
            span.file.load(span, block)
        except (InvalidCheckpoint, OSError):
            ctypes.memset(block.address, 0, span.length)
            raise

    def _exchange(self, spans: Sequence[Span], number: int) -> list[Block]:
        size = max(span.length for span in spans)
        received = self._blocks[number % _AHEAD]
        own = self._loaded[number % len(self._loaded)]
        try:
            dist.all_gather([_bytes(block, size) for block in received], _bytes(own, size), group=self._group)
        except RuntimeError as error:
            raise RankFailed(None, f"a rank was lost during the cooperative read of a checkpoint: {error}") from error
        return received


def _bytes(block: Block, size: int) -> torch.Tensor:
    return torch.frombuffer(block.view, dtype=torch.uint8, count=size)


def _deliver(span: Span, block: Block, progress: Callable[[int], None] | None) -> None:
    span.file.deliver(span, block)
    if progress is not None:
        progress(span.length)


def _raise_first(delivered: Sequence[Future[None]], load: Future[None]) -> None:
    """Raise the first error of a round. The error of the load explains more than that of the delivery."""
    for delivery in delivered:
        error = delivery.exception()
        if error is not None:
            raise load.exception() or error
