"""The part of a checkpoint that the ranks of this node will read, for the warm-up of a job with several nodes.

Ranks read a checkpoint together: of each round of spans, rank i reads the i-th (`checkpoint/io/cooperative_read.py`).
So a node that read all of it would read what others need, and storage would deliver the checkpoint once per node. How
many nodes there are, and which one this is, follows from torchrun's or accelerate's options or from the environment.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeShare:
    """This node's share of a job."""

    nodes: int = 1
    node: int | None = 0
    """None: unknown, because the nodes get their numbers only when they meet."""
    ranks: int = 1
    """On each node; 1 where it is unknown."""

    def has_span(self, index: int) -> bool:
        """Whether a rank of this node reads the span with this index."""
        return index // self.ranks % self.nodes == self.node


def find_node_share(words: Sequence[str], env: Mapping[str, str]) -> NodeShare:
    """Return the share of the node that runs this command in this environment."""
    options = launcher_options(words)
    if (machines := _number(options.get("num-machines"))) is not None:  # accelerate launch
        total = _number(options.get("num-processes")) or machines
        return _share(machines, _number(options.get("machine-rank")), total // machines)
    nodes = options.get("nnodes") or env.get("PET_NNODES", "")
    if nodes:  # torchrun
        node = _number(options.get("node-rank") or env.get("PET_NODE_RANK"))
        ranks = _number(options.get("nproc-per-node") or env.get("PET_NPROC_PER_NODE"))
        least, _, most = nodes.partition(":")
        # With a range of nodes, any of them may be missing.
        return _share(_number(most or least), node if most in ("", least) else None, ranks)
    ranks = _number(env.get("LOCAL_WORLD_SIZE")) or 1
    world_size, rank = _number(env.get("WORLD_SIZE")) or 1, _number(env.get("RANK"))
    return _share(world_size // ranks, rank // ranks if rank is not None else None, ranks)


def _share(nodes: int | None, node: int | None, ranks: int | None) -> NodeShare:
    if not nodes or nodes == 1:
        return NodeShare()
    return NodeShare(nodes=nodes, node=node, ranks=ranks or 1)


def launcher_options(words: Sequence[str]) -> dict[str, str]:
    """Return the options before the script: `--nnodes=2` and `--nnodes 2`, with underscores or hyphens."""
    found: dict[str, str] = {}
    for word, after in zip(words, [*words[1:], ""], strict=True):
        if word.endswith(".py"):
            break
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            found.setdefault(name.replace("_", "-"), value if equals else after)
    return found


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.strip().isdecimal() else None
