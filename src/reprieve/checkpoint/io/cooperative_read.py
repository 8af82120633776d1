"""Replicas read a checkpoint together: each reads a part from storage and gets the rest from the others.

In each round every rank loads one span, all give theirs to all (over gloo, between the hosts' memories, so that it
works whatever backend training uses), and each verifies and delivers all of them. A rank that cannot read its span
gives zeros: their checksum is wrong on every rank, so all stop at the same round, and nobody is left waiting in a
collective. Only a rank that dies or stalls is waited for, as long as the group's time limit says.
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
"""Ranks that read together: enough that storage is no longer the limit, few enough that a round fits into 256 MiB."""
_AHEAD = 2
"""Rounds that are loaded or delivered while another one is being exchanged."""


class CooperativeReader:
    """Reads spans together with the neighbouring ranks, over torch.distributed."""

    def __init__(self, ranks: Ranks, limit: timedelta) -> None:
        """A collective: every rank makes one."""
        self._group: dist.ProcessGroup | None = None
        for first in range(0, ranks.world_size, _GROUP):
            members = list(range(first, min(first + _GROUP, ranks.world_size)))
            try:
                group = dist.new_group(members, timeout=limit, backend="gloo")
            except RuntimeError as error:
                raise RankFailed(None, f"a rank did not come to read a checkpoint together: {error}") from error
            if ranks.rank in members:
                self._group = group
                self._place, self._size = members.index(ranks.rank), len(members)
        # Memory of its own: a block that is on its way to another rank must not go back to a pool.
        self._blocks = [[Block(pinned=False) for _ in range(self._size)] for _ in range(_AHEAD)]
        self._loaded = [Block(pinned=False) for _ in range(_AHEAD + 1)]

    def read(self, spans: Sequence[Span], *, progress: Callable[[int], None] | None) -> None:
        rounds = [spans[at : at + self._size] for at in range(0, len(spans), self._size)]
        threads = ThreadPool(4, "reprieve-read")
        loads: list[Future[None]] = []
        delivered: list[list[Future[None]]] = []
        try:
            for number, these in enumerate(rounds):
                while len(loads) < min(number + _AHEAD + 1, len(rounds)):
                    loads.append(threads.submit(partial(self._load, rounds[len(loads)], len(loads))))
                # Every rank looks at the same rounds before the next exchange: all stop before the same one.
                if number >= _AHEAD:
                    _raise_first([*delivered[number - _AHEAD]], loads[number - _AHEAD])
                loads[number].exception()  # a rank that could not read still takes part
                blocks = self._exchange(these, number)
                delivered.append(
                    [
                        threads.submit(partial(_deliver, span, block, progress))
                        for span, block in zip(these, blocks, strict=False)
                    ]
                )
            for number, waiting in enumerate(delivered):
                _raise_first(waiting, loads[number])
        finally:
            threads.join()

    def close(self) -> None:
        if self._group is not None:
            with contextlib.suppress(RuntimeError, ValueError):
                dist.destroy_process_group(self._group)

    def _load(self, these: Sequence[Span], number: int) -> None:
        if self._place >= len(these):
            return
        block = self._loaded[number % len(self._loaded)]
        span = these[self._place]
        try:
            span.file.load(span, block)
        except (InvalidCheckpoint, OSError):
            ctypes.memset(block.address, 0, span.length)
            raise

    def _exchange(self, these: Sequence[Span], number: int) -> list[Block]:
        size = max(span.length for span in these)
        into = self._blocks[number % _AHEAD]
        mine = self._loaded[number % len(self._loaded)]
        try:
            dist.all_gather([_bytes(block, size) for block in into], _bytes(mine, size), group=self._group)
        except RuntimeError as error:
            raise RankFailed(None, f"a rank was lost while a checkpoint was read together: {error}") from error
        return into


def _bytes(block: Block, size: int) -> torch.Tensor:
    return torch.frombuffer(block.view, dtype=torch.uint8, count=size)


def _deliver(span: Span, block: Block, progress: Callable[[int], None] | None) -> None:
    span.file.deliver(span, block)
    if progress is not None:
        progress(span.length)


def _raise_first(delivered: Sequence[Future[None]], load: Future[None]) -> None:
    """What went wrong in a round; why it could not be read says more than that it did not arrive."""
    for done in delivered:
        error = done.exception()
        if error is not None:
            raise load.exception() or error
