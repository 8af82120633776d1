"""Which part of a checkpoint the ranks of a node read, and how a launcher knows."""

from __future__ import annotations

import pytest

from reprieve.launch.node_share import NodeShare, find_node_share

ALONE = NodeShare()
UNKNOWN = NodeShare(nodes=2, node=None)


@pytest.mark.parametrize(
    ("command", "env", "share"),
    [
        ("python train.py", {}, ALONE),
        ("torchrun --nproc-per-node 8 train.py", {}, ALONE),
        ("torchrun --nnodes 1 --nproc-per-node 8 train.py", {}, ALONE),
        ("torchrun train.py", {"PET_NNODES": "1"}, ALONE),
        (
            "torchrun train.py",
            {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_NPROC_PER_NODE": "4"},
            NodeShare(nodes=2, node=1, ranks=4),
        ),
        (
            "torchrun train.py",
            {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_NPROC_PER_NODE": "gpu"},
            NodeShare(nodes=2, node=1),
        ),
        ("torchrun --nnodes=2 --node-rank=1 train.py", {"PET_NNODES": "4"}, NodeShare(nodes=2, node=1)),
        (
            "python -m torch.distributed.run --nnodes 3 --node_rank 2 --nproc_per_node 2 train.py --nnodes 9",
            {},
            NodeShare(nodes=3, node=2, ranks=2),
        ),
        ("torchrun --nnodes 2 --rdzv-backend c10d train.py", {}, UNKNOWN),
        ("torchrun --nnodes 1:2 --node-rank 0 train.py", {}, UNKNOWN),
        ("torchrun --nnodes 2:2 --node-rank 0 train.py", {}, NodeShare(nodes=2, node=0)),
        (
            "accelerate launch --num_machines 2 --machine_rank 1 --num_processes 16 train.py",
            {},
            NodeShare(nodes=2, node=1, ranks=8),
        ),
        ("python train.py", {"WORLD_SIZE": "2", "RANK": "1"}, NodeShare(nodes=2, node=1)),
        (
            "python train.py",
            {"WORLD_SIZE": "4", "RANK": "2", "LOCAL_WORLD_SIZE": "2"},
            NodeShare(nodes=2, node=1, ranks=2),
        ),
        ("python train.py", {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_WORLD_SIZE": "2"}, ALONE),
    ],
)
def test_what_the_launcher_knows(command: str, env: dict[str, str], share: NodeShare) -> None:
    assert find_node_share(command.split(), env) == share


@pytest.mark.parametrize(("nodes", "ranks"), [(1, 4), (2, 1), (2, 4), (4, 2), (8, 1), (4, 4), (2, 8), (3, 2)])
def test_each_span_is_read_on_the_node_whose_rank_needs_it(nodes: int, ranks: int) -> None:
    """Eight ranks, or all where there are fewer, read together: of each round, rank i reads the i-th span."""
    shares = [NodeShare(nodes=nodes, node=node, ranks=ranks) for node in range(nodes)]
    group = min(8, nodes * ranks)
    for index in range(200):
        [share] = [share for share in shares if share.has_span(index)]
        assert share.node is not None
        readers = {rank % group for rank in range(share.node * ranks, (share.node + 1) * ranks)}
        assert index % group in readers
