"""Compares replicas that should be equal, on a sample, at every save.

Each replica of a tensor writes another part of it, so a checkpoint would mix ranks that have drifted apart (a missed
broadcast, a bad GPU). Before a save every rank hashes the same few pieces of what is replicated. The pieces change with
the step, so that a lasting difference is found sooner or later.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from reprieve.checkpoint.buffers.block_pool import BlockPool
from reprieve.checkpoint.buffers.cuda_streams import CopyStreams
from reprieve.checkpoint.format.checksum import digest_of
from reprieve.checkpoint.format.layout import Segment, devices_of
from reprieve.checkpoint.format.torch_layout import tensors_in
from reprieve.checkpoint.save.plan import Plan

_SAMPLES = 16
_SAMPLE_BYTES = 2**16
"""A megabyte in all: well under a millisecond of hashing."""


@dataclass(frozen=True, slots=True)
class Divergence:
    """A tensor that differs between ranks that should hold the same values."""

    tensor: str
    ranks: tuple[int, ...]
    """The ranks that differ from the majority."""

    def __str__(self) -> str:
        ranks = ", ".join(map(str, self.ranks))
        return f"{self.tensor} on rank{'s' * (len(self.ranks) > 1)} {ranks} differs from the other ranks"


def sample(plan: Plan, seed: int, rank: int, pool: BlockPool) -> dict[str, str]:
    """Checksums of the same few places on every rank that holds them, by file and tensor."""
    candidates = [
        (layout.name, segment)
        for layout in plan.files
        if layout.is_shared
        for segment in layout.segments
        if isinstance(segment, Segment) and segment.label and (segment.holders is None or len(segment.holders) > 1)
    ]
    choice = random.Random(seed)  # noqa: S311 - a generator of its own: the training's are not touched
    chosen = choice.sample(candidates, min(_SAMPLES, len(candidates)))
    starts = [choice.randrange(max(1, segment.length - _SAMPLE_BYTES + 1)) for _, segment in chosen]
    digests: dict[str, str] = {}
    block = pool.take()
    assert block is not None
    try:
        with CopyStreams(devices_of(plan.files)) as streams:
            for (file, segment), start in zip(chosen, starts, strict=True):
                if segment.source is None or (segment.holders is not None and rank not in segment.holders):
                    continue
                stop = min(start + _SAMPLE_BYTES, segment.length)
                segment.source.copy(block, 0, start, stop)
                streams.wait()
                digests[f"{file}/{segment.label}@{segment.offset + start}"] = digest_of(block.view[: stop - start])
    finally:
        pool.give(block)
    return digests


def compare(samples: Sequence[Mapping[str, str]], plan: Plan) -> list[Divergence]:
    """The tensors that differ between ranks. `samples`: the checksums of each rank."""
    divergences = []
    for place in sorted({place for sample in samples for place in sample}):
        digests = {rank: sample[place] for rank, sample in enumerate(samples) if place in sample}
        majority = Counter(digests.values()).most_common(1)[0][0]
        if differing := tuple(rank for rank, digest in digests.items() if digest != majority):
            divergences.append(Divergence(_tensor_at(place, plan), differing))
    return divergences


def _tensor_at(place: str, plan: Plan) -> str:
    """The tensor's name as the user knows it: `model.weight`, or `optimizer.state.0.exp_avg`."""
    file, label = place.rsplit("@", 1)[0].split("/", 1)
    name = file.split(".", 1)[0]
    layout = next(layout for layout in plan.files if layout.name == file)
    if layout.pickled is None:
        return f"{name}.{label}"
    storage = layout.pickled.storages[int(label.removeprefix("data/"))]
    for path, tensor in tensors_in(layout.pickled.tree):
        if tensor is storage or (
            type(tensor) is not type(storage) and tensor.untyped_storage()._cdata == storage._cdata
        ):
            return ".".join(map(str, (name, *path)))
    return f"{name}, storage {label}"
