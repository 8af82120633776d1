"""Saves and restores of several ranks: replicas split the work, shards go to their places, all ranks agree."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from reprieve.checkpoint.buffers.block_pool import BlockPool
from reprieve.checkpoint.folder.catalog import list_checkpoints
from reprieve.checkpoint.folder.verify import verify
from reprieve.checkpoint.format.manifest import read_manifest
from reprieve.checkpoint.save.plan import plan
from reprieve.checkpoint.state.state import State
from reprieve.testing import run_ranks, values
from tests.support.jobs import engine_jobs
from tests.support.jobs.engine_jobs import Large


def same(got: Any, want: Any) -> bool:
    if isinstance(want, torch.Tensor):
        return isinstance(got, torch.Tensor) and got.dtype == want.dtype and bool(torch.equal(got, want))
    if isinstance(want, dict):
        return list(got) == list(want) and all(same(got[key], want[key]) for key in want)
    if isinstance(want, list | tuple):
        return len(got) == len(want) and all(same(value, other) for value, other in zip(got, want, strict=True))
    return bool(got == want)


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("ranks", [2, 3])
def test_replicas_save_and_restore(ranks: int, background: bool, tmp_path: Path) -> None:
    saved = values(run_ranks(ranks, engine_jobs.save_ddp, tmp_path, background))
    verify(tmp_path / "checkpoint-2", BlockPool())
    restored = values(run_ranks(ranks, engine_jobs.restore_ddp, tmp_path))
    for rank in range(ranks):
        assert same(restored[rank][:2], saved[0][:2])
        assert same(restored[rank][2], saved[rank][2]), "each rank's own generator"
        assert restored[rank][3:] == (rank, rank, 2)
    assert read_manifest(tmp_path / "checkpoint-2").world_size == ranks


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.fsdp
def test_shards_go_to_their_places_and_any_number_of_ranks_reads_them(background: bool, tmp_path: Path) -> None:
    saved = values(run_ranks(3, engine_jobs.save_fsdp, tmp_path, background))
    folder = tmp_path / "checkpoint-2"
    verify(folder, BlockPool())
    stock = load_file(folder / "model.safetensors")
    tied = {"head.weight"}
    assert set(stock) == set(saved[0][0]) - tied
    assert all(torch.equal(stock[key], saved[0][0][key]) for key in stock)
    assert same(torch.load(folder / "optimizer.pt", weights_only=True), saved[0][1])
    for ranks in (1, 2, 4):
        for state in values(run_ranks(ranks, engine_jobs.restore_fsdp, tmp_path)):
            assert same(state, saved[0])
    (alone,) = values(run_ranks(1, engine_jobs.restore_alone, tmp_path, backend=None))
    assert same(alone, saved[0])


@pytest.mark.fsdp
def test_pieces_of_many_ranks_make_the_same_files(tmp_path: Path) -> None:
    """Megabytes, over a few ranks: together they write what stock readers expect, and what a single rank writes."""
    shards = values(run_ranks(3, engine_jobs.save_fsdp, tmp_path / "shards", True, None, Large))
    replicas = values(run_ranks(4, engine_jobs.save_ddp, tmp_path / "replicas", False, Large))
    for folder, saved in (("shards", shards), ("replicas", replicas)):
        checkpoint = tmp_path / folder / "checkpoint-2"
        verify(checkpoint, BlockPool())
        stock = load_file(checkpoint / "model.safetensors")
        assert same(dict(sorted(stock.items())), dict(sorted(saved[0][0].items())))
        assert same(torch.load(checkpoint / "optimizer.pt", weights_only=True), saved[0][1])
        with zipfile.ZipFile(checkpoint / "optimizer.pt") as archive:
            assert archive.testzip() is None
        assert len(read_manifest(checkpoint).files["optimizer.pt"].blocks) >= 3
    for state in values(run_ranks(4, engine_jobs.restore_ddp, tmp_path / "replicas", Large)):
        assert same(state[:2], replicas[0][:2])
    for state in values(run_ranks(2, engine_jobs.restore_fsdp, tmp_path / "shards", None, Large)):
        assert same(state, shards[0])
    size = read_manifest(tmp_path / "shards" / "checkpoint-2").size
    read = values(run_ranks(3, engine_jobs.bytes_read, tmp_path / "shards"))
    assert sum(read) < 1.2 * size, "each rank reads its own part, and a little of what all need"
    assert max(read) < 0.45 * size


def test_replicas_write_equal_parts(tmp_path: Path) -> None:
    values(run_ranks(4, engine_jobs.save_ddp, tmp_path, False, Large))
    model = Large()
    optimizer = engine_jobs.adamw(model)
    engine_jobs.steps(model, optimizer, 1, engine_jobs.data_of(0))
    shares = [plan(State({"model": model, "optimizer": optimizer}), rng=False, rank=rank, world_size=4).share
              for rank in range(4)]  # fmt: skip
    mean = sum(shares) / 4
    assert max(shares) - mean <= 0.02 * mean and mean - min(shares) <= 0.02 * mean


def test_a_save_by_time_is_at_one_step(tmp_path: Path) -> None:
    saved = values(run_ranks(3, engine_jobs.save_by_time, tmp_path))
    assert saved[0] == saved[1] == saved[2]
    assert len(saved[0]) >= 3
    assert sorted(info.step for info in list_checkpoints(tmp_path)) == saved[0]


@pytest.mark.fsdp
def test_what_one_rank_wrote_is_read_by_several(tmp_path: Path) -> None:
    (saved,) = values(run_ranks(1, engine_jobs.save_fsdp, tmp_path))
    for state in values(run_ranks(3, engine_jobs.restore_fsdp, tmp_path)):
        assert same(state, saved)


@pytest.mark.fsdp
def test_replicated_shards(tmp_path: Path) -> None:
    saved = values(run_ranks(4, engine_jobs.save_fsdp, tmp_path, False, (2, 2)))
    for state in values(run_ranks(4, engine_jobs.restore_fsdp, tmp_path, (2, 2))):
        assert same(state, saved[0])
    for state in values(run_ranks(2, engine_jobs.restore_fsdp, tmp_path)):
        assert same(state, saved[0])
