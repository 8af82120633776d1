"""Copying boxes of saved tensors into live ones: any shape, any box, any strides, blocks cut anywhere."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from reprieve.adapters.dcp.regions import Box, RowsDestination, bounce_buffer, make_targets
from reprieve.checkpoint.buffers.block_pool import Block
from reprieve.checkpoint.io.reader import Target

DTYPES = [torch.float32, torch.int64, torch.bool, torch.bfloat16, torch.complex64, torch.float8_e4m3fn]
BLOCK = Block(pinned=False)


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    count = int(torch.Size(shape).numel()) * dtype.itemsize
    values = torch.randint(0, 2 if dtype == torch.bool else 256, (count,), dtype=torch.uint8)
    return values.view(dtype).view(shape)


def bits(tensor: torch.Tensor) -> bytes:
    tensor = tensor.reshape(()) if tensor.numel() == 1 else tensor.contiguous()  # one element may have any stride
    return tensor.view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def deliver(saved: torch.Tensor, targets: list[Target], cuts: random.Random) -> None:
    """Copy as the reader does: parts of the file in any order, each somewhere in a block of memory."""
    data = bits(saved)
    edges = sorted({0, len(data), *(cuts.randrange(len(data) + 1) for _ in range(cuts.randrange(6)))})
    pieces = list(itertools.pairwise(edges))
    cuts.shuffle(pieces)
    for start, stop in pieces:
        at = cuts.randrange(100)
        BLOCK.view[at : at + stop - start] = data[start:stop]
        for target in targets:
            first, last = max(start, target.offset), min(stop, target.offset + target.length)
            if first < last:
                target.destination.put(BLOCK, at + first - start, first - target.offset, last - target.offset)


@st.composite
def boxes(draw: st.DrawFn) -> dict[str, Any]:
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=4)))
    lengths = tuple(draw(st.integers(0, size)) for size in shape)
    offsets = tuple(draw(st.integers(0, size - length)) for size, length in zip(shape, lengths, strict=True))
    margins = tuple(draw(st.tuples(st.integers(0, 2), st.integers(0, 2))) for _ in shape)
    order = draw(st.permutations(range(len(shape))))
    step = draw(st.sampled_from([1, 1, 2]))
    return {
        "box": Box(shape, draw(st.sampled_from(DTYPES)), offsets, lengths),
        "margins": margins,
        "order": order,
        "step": step,
        "seed": draw(st.integers(0, 2**31)),
    }


@given(boxes())
def test_every_byte_of_a_box_arrives_and_nothing_else_changes(case: dict[str, Any]) -> None:
    box: Box = case["box"]
    torch.manual_seed(case["seed"])
    saved = random_tensor(box.shape, box.dtype)
    # A view into a larger tensor, with dimensions in any order in memory, perhaps every other element.
    outer = tuple(length + before + after for length, (before, after) in zip(box.lengths, case["margins"], strict=True))
    stored = [outer[dim] for dim in case["order"]]
    if stored:
        stored[-1] *= case["step"]
    live = random_tensor(tuple(stored), box.dtype)
    around = (
        live[..., :: case["step"]].permute([case["order"].index(dim) for dim in range(len(outer))]) if stored else live
    )
    into = around[tuple(slice(b, b + n) for n, (b, _) in zip(box.lengths, case["margins"], strict=True))]
    expected = live.clone()
    wanted = saved[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.lengths, strict=True))]
    targets = make_targets(box, into)
    if targets is None:
        between = bounce_buffer(box)
        targets = make_targets(box, between)
        assert targets is not None
        deliver(saved, targets, random.Random(case["seed"]))
        assert bits(between) == bits(wanted)
        return
    deliver(saved, targets, random.Random(case["seed"]))
    assert bits(into) == bits(wanted)
    into.copy_(expected.as_strided(into.shape, into.stride(), into.storage_offset()))
    assert bits(live) == bits(expected), "something beside the box was written to"


@pytest.mark.parametrize(
    ("shape", "offsets", "lengths", "kinds"),
    [
        ((8, 6), (0, 0), (8, 6), ["one run"]),
        ((8, 6), (2, 0), (3, 6), ["one run"]),  # rows: FSDP to another number of ranks
        ((8, 6), (0, 2), (8, 2), ["rows"]),  # columns: FSDP to tensor parallel
        ((8, 6), (5, 2), (1, 2), ["one run"]),
        ((3, 8, 6), (0, 0, 2), (3, 8, 2), ["rows"] * 3),
        ((3, 8, 6), (1, 2, 0), (1, 3, 6), ["one run"]),
        ((3, 8, 6), (0, 2, 0), (3, 3, 6), ["rows"]),
        ((), (), (), ["one run"]),
        ((0, 4), (0, 0), (0, 4), []),
    ],
)
def test_as_few_pieces_as_there_can_be(
    shape: tuple[int, ...], offsets: tuple[int, ...], lengths: tuple[int, ...], kinds: list[str]
) -> None:
    targets = make_targets(Box(shape, torch.float32, offsets, lengths), torch.empty(lengths))
    assert targets is not None
    assert ["rows" if isinstance(target.destination, RowsDestination) else "one run" for target in targets] == kinds


def test_what_cannot_be_reached_directly() -> None:
    box = Box((4, 4), torch.float32, (0, 0), (4, 4))
    assert make_targets(box, torch.empty(4, 4, dtype=torch.bfloat16)) is None, "another type"
    assert make_targets(box, torch.empty(4, 4).t()) is None, "columns first"
    assert make_targets(box, torch.empty(4, 4, device="meta")) is None
    many = Box((2000, 2, 2, 2), torch.float32, (0, 0, 0, 0), (2000, 2, 2, 1))
    assert make_targets(many, bounce_buffer(many)) is None, "thousands of tiny runs"
    assert make_targets(many.whole, bounce_buffer(many.whole)) is not None
