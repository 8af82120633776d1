"""The plan of a save: which files a state becomes, how large each is and which rank writes what.

It is made before a byte moves. `SaveJob` carries it out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from reprieve.checkpoint.buffers.block_pool import BLOCK_BYTES
from reprieve.checkpoint.format.checksum import BlockHash
from reprieve.checkpoint.format.file_names import buffers_name, extras_file, tree_file
from reprieve.checkpoint.format.layout import BytesSource, FileLayout, Segment, bytes_layout
from reprieve.checkpoint.format.safetensors_layout import layout_safetensors
from reprieve.checkpoint.format.torch_layout import layout_torch, tensors_in
from reprieve.checkpoint.io.partition import FileShare, blocks_needed, partition_files
from reprieve.checkpoint.state.state import Captured, Sharing, State
from reprieve.errors import StateError
from reprieve.storage.disk import PAGE

SHARD_BYTES = 50 * 10**9
"""Above this a model is split over several files, as transformers does."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The files of one save that this rank writes, whole or in part."""

    files: list[FileLayout]
    parts: list[FileShare] = field(repr=False)
    """This rank's share of each file."""

    @property
    def bytes(self) -> int:
        """The size of the files together, the shares of other ranks included."""
        return sum(file.size for file in self.files)

    @property
    def folders(self) -> set[str]:
        """The folders below the checkpoint's own that its files are in."""
        return {str(folder) for file in self.files for folder in PurePosixPath(file.name).parents[:-1]}

    @property
    def share(self) -> int:
        """Bytes that this rank writes."""
        return sum(piece.stop - piece.start for part in self.parts for piece in part.own_ranges)

    @property
    def blocks(self) -> int:
        """Blocks of memory that this rank's share takes."""
        return blocks_needed(self.parts)

    def bytes_on_disk(self, *, alone: bool = True) -> int:
        """Bytes that the files take on a disk, rounded up to pages, with manifest, sentinel and folder.

        Without `alone`, only of the files that no other rank writes parts of.
        """
        files = self.files if alone else [file for file in self.files if not file.is_shared]
        return sum(file.size + PAGE + file.size // BLOCK_BYTES * 64 for file in files) + (4 * PAGE if alone else 0)

    def fingerprints(self) -> dict[str, str]:
        """A fingerprint of each file that all ranks write parts of. It must be the same on all of them."""
        return {file.name: _fingerprint(file) for file in self.files if file.is_shared}


def plan(
    state: State,
    values: Mapping[str, Any] | None = None,
    *,
    extra_files: Sequence[FileLayout] = (),
    rng: bool = True,
    shard_bytes: int = SHARD_BYTES,
    rank: int = 0,
    world_size: int = 1,
) -> Plan:
    """Plan a save of the state as it is now. `extra_files`: files of this rank beside those of the state.

    Large files come first: they keep the disk busy from the start, and the small ones share its last flush.
    """
    captured = state.captured(values, rng=rng)
    files: list[FileLayout] = []
    several = world_size > 1
    for name, tensors in captured.modules.items():
        of_rank_0, ties = captured.buffers[name], captured.ties[name]
        for layout in layout_safetensors(name, tensors, shard_bytes=shard_bytes, ties=ties, of_rank_0=of_rank_0):
            layout.is_shared = several and layout.name.endswith(".safetensors")
            files.append(layout)
    for name, extras in captured.extras.items():
        if extras:
            files.append(layout_torch(extras_file(name), extras))
    for name, config in captured.configs.items():
        file = "config.json" if name == "model" else f"{name}.config.json"
        files.append(bytes_layout(file, json.dumps(config, indent=2, sort_keys=True).encode() + b"\n"))
    own = {
        buffers_name(name): buffers
        for name in state.own_buffers
        if several and (buffers := own_buffers(captured, name))
    }
    for name, tree in captured.trees.items():
        sharing = state.sharing(name) if several else Sharing.FIRST
        if sharing is Sharing.OWN:
            own[name] = tree
        else:
            files.append(layout_torch(tree_file(name), tree, is_shared=sharing is Sharing.ALL))
    files = [file for file in files if file.is_shared or rank == 0]
    files += [layout_torch(tree_file(name, rank), tree) for name, tree in own.items()]
    files += extra_files
    for layout in files:
        if not layout.is_shared:
            _refuse_shards(layout, rank)
    files.sort(key=lambda file: (not file.is_shared, -file.size, file.name))
    return Plan(files, partition_files(files, rank, world_size))


def own_buffers(captured: Captured, name: str) -> dict[str, Any]:
    """The buffers of a module that each rank keeps for itself."""
    return {key: value for key, value in captured.modules[name].items() if key in captured.buffers[name]}


def _refuse_shards(layout: FileLayout, rank: int) -> None:
    """Raise StateError for a sharded tensor in a file that this rank writes alone: it does not hold every byte."""
    for segment in layout.segments:
        if isinstance(segment, Segment) and not segment.held_by(rank):
            path: tuple[object, ...] = (segment.label,)
            if layout.pickled is not None:
                sharded = layout.pickled.storages[int(segment.label.removeprefix("data/"))]
                path = next((path for path, tensor in tensors_in(layout.pickled.tree) if tensor is sharded), path)
            raise StateError(
                f"{layout.name}: {'.'.join(map(str, path))} is sharded over ranks, but each rank saves this file for "
                "itself. Modules and optimizers may have sharded tensors; of others save `full_tensor()`"
            )


def _fingerprint(layout: FileLayout) -> str:
    digest = BlockHash()
    for segment in layout.segments:
        holders = segment.holders if isinstance(segment, Segment) else None
        digest.update(repr((segment.offset, segment.length, holders)).encode())
        if isinstance(segment, Segment) and isinstance(segment.source, BytesSource):
            digest.update(segment.source.data)
    return digest.hexdigest()
