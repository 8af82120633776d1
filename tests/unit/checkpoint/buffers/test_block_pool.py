"""The pool of blocks: how many it allocates ahead."""

from __future__ import annotations

import pytest

from reprieve.checkpoint.buffers.block_pool import RING_BLOCKS, BlockPool


@pytest.mark.parametrize("blocks", [1, RING_BLOCKS, RING_BLOCKS + 1])
def test_no_more_blocks_are_allocated_ahead_than_are_needed(blocks: int) -> None:
    """A state of one block must not touch the memory of a whole ring: 128 MiB in each rank."""
    pool = BlockPool()
    pool.grow(blocks)
    assert (pool.made, pool.ready) == (blocks, blocks)
    assert pool.limit == max(RING_BLOCKS, blocks)


def test_allocating_ahead_can_be_stopped() -> None:
    pool = BlockPool()
    pool.grow(RING_BLOCKS, stop=lambda: pool.made == 2)
    assert pool.made == 2
