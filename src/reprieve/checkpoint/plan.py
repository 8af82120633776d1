"""Which files a state becomes, and how large each will be, before a byte moves."""

from __future__ import annotations

import json
from dataclasses import dataclass

from reprieve.checkpoint.blocks import BLOCK_BYTES
from reprieve.checkpoint.layout import FileLayout, bytes_layout
from reprieve.checkpoint.safetensors_file import layout_safetensors
from reprieve.checkpoint.state import RNG, Captured
from reprieve.checkpoint.torch_file import layout_torch

SHARD_BYTES = 50 * 10**9
"""Above this a model is split over several files, as transformers does."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The files of one save."""

    files: list[FileLayout]

    @property
    def bytes(self) -> int:
        return sum(file.size for file in self.files)

    @property
    def blocks(self) -> int:
        return sum(-(-file.size // BLOCK_BYTES) for file in self.files)


def plan(captured: Captured, *, shard_bytes: int = SHARD_BYTES) -> Plan:
    """Large files first: the disk is busy from the first moment, and the small ones share its last flush."""
    files: list[FileLayout] = []
    for name, tensors in captured.modules.items():
        files += layout_safetensors(name, tensors, shard_bytes=shard_bytes)
    for name, extras in captured.extras.items():
        if extras:
            files.append(layout_torch(extras_file(name), extras))
    for name, tree in captured.trees.items():
        files.append(layout_torch(tree_file(name), tree))
    for name, config in captured.configs.items():
        file = "config.json" if name == "model" else f"{name}.config.json"
        files.append(bytes_layout(file, json.dumps(config, indent=2, sort_keys=True).encode() + b"\n"))
    return Plan(sorted(files, key=lambda file: -file.size))


def extras_file(name: str) -> str:
    return f"{name}.extra.pt"


def tree_file(name: str) -> str:
    return f"{RNG}.pth" if name == RNG else f"{name}.pt"
