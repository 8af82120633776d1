"""The engine among several ranks: replicas split the work, shards go to their places, all agree."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from reprieve.checkpoint.blocks import BlockPool
from reprieve.checkpoint.manifest import read_manifest
from reprieve.checkpoint.verify import verify
from reprieve.testing import run_ranks, values

from . import rank_jobs
from .rank_jobs import Odd


def same(got: Any, want: Any) -> bool:
    if isinstance(want, torch.Tensor):
        return isinstance(got, torch.Tensor) and got.dtype == want.dtype and bool(torch.equal(got, want))
    if isinstance(want, dict):
        return list(got) == list(want) and all(same(got[key], want[key]) for key in want)
    if isinstance(want, list | tuple):
        return len(got) == len(want) and all(same(one, other) for one, other in zip(got, want, strict=True))
    return bool(got == want)


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("ranks", [2, 3])
def test_replicas_save_and_restore(ranks: int, background: bool, tmp_path: Path) -> None:
    saved = values(run_ranks(ranks, rank_jobs.save_ddp, tmp_path, background))
    verify(tmp_path / "checkpoint-2", BlockPool())
    restored = values(run_ranks(ranks, rank_jobs.restore_ddp, tmp_path))
    for rank in range(ranks):
        assert same(restored[rank][:2], saved[0][:2])
        assert same(restored[rank][2], saved[rank][2]), "each rank's own generator"
        assert restored[rank][3:] == (rank, rank, 2)
    assert read_manifest(tmp_path / "checkpoint-2").world_size == ranks


@pytest.mark.parametrize("background", [False, True])
def test_shards_go_to_their_places_and_any_number_of_ranks_reads_them(background: bool, tmp_path: Path) -> None:
    saved = values(run_ranks(3, rank_jobs.save_fsdp, tmp_path, background))
    folder = tmp_path / "checkpoint-2"
    verify(folder, BlockPool())
    stock = load_file(folder / "model.safetensors")
    tied = {"head.weight"}
    assert set(stock) == set(saved[0][0]) - tied
    assert all(torch.equal(stock[key], saved[0][0][key]) for key in stock)
    assert same(torch.load(folder / "optimizer.pt", weights_only=True), saved[0][1])
    for ranks in (1, 2, 4):
        for state in values(run_ranks(ranks, rank_jobs.restore_fsdp, tmp_path)):
            assert same(state, saved[0])
    (alone,) = values(run_ranks(1, rank_jobs.restore_alone, tmp_path, backend=None))
    assert same(alone, saved[0])


def test_what_one_rank_wrote_is_read_by_several(tmp_path: Path) -> None:
    (saved,) = values(run_ranks(1, rank_jobs.save_fsdp, tmp_path))
    for state in values(run_ranks(3, rank_jobs.restore_fsdp, tmp_path)):
        assert same(state, saved)


def test_replicated_shards(tmp_path: Path) -> None:
    saved = values(run_ranks(4, rank_jobs.save_fsdp, tmp_path, False, (2, 2)))
    for state in values(run_ranks(4, rank_jobs.restore_fsdp, tmp_path, (2, 2))):
        assert same(state, saved[0])
    for state in values(run_ranks(2, rank_jobs.restore_fsdp, tmp_path)):
        assert same(state, saved[0])


_ = Odd
