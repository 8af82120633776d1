"""Trainers under FSDP2: each rank saves its shards as stock does, and no rank waits for one that cannot save."""

from __future__ import annotations

import errno
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from reprieve.adapters.dcp.metadata import DATA_OFFSET
from reprieve.testing import Fault, fail, full_disk, pause
from tests.support.hf_kit import after, attempt, ends, stopped, train_to_end, undisturbed, valid
from tests.support.jobs.hf_jobs import HfJob, seen
from tests.support.jobs.stop_scenario_jobs import told

pytestmark = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.17"),
    reason=f"transformers {transformers.__version__} does FSDP on GPUs only",
)

FULL = OSError(errno.ENOSPC, "No space left on device")
SHARDS = [".metadata", "__0_0.distcp", "__1_0.distcp"]


@pytest.fixture
def job(tmp_path: Path) -> HfJob:
    """6 steps in each of two epochs, 3 batches in an evaluation."""
    return _job(tmp_path / "job")


def _job(folder: Path) -> HfJob:
    return HfJob(str(folder), sharded="SHARDED_STATE_DICT", samples=48).but(per_device_eval_batch_size=2)


@pytest.fixture
def plain(job: HfJob) -> HfJob:
    """Fetches draw no random numbers: then even stock resumes exactly."""
    return replace(job, masking=False)


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> HfJob:
    """A job that resumed without Reprieve from stock's checkpoint of step 4."""
    job = replace(_job(tmp_path_factory.mktemp("stock") / "job"), masking=False, safe=False)
    ends(job.but(save_strategy="steps", save_steps=4), 2)
    for later in (8, 12):
        shutil.rmtree(job.output / f"checkpoint-{later}")
    ends(replace(job, given=True), 2)
    return job


@pytest.mark.parametrize("at", [("forward", 4), ("prediction", 2)], ids=lambda at: f"{at[0]}-{at[1]}")
def test_stopped_anywhere(job: HfJob, at: tuple[str, int]) -> None:
    """In an evaluation the outermost weights are gathered, and are saved as shards all the same."""
    assert "FULL_STATE_DICT" not in stopped(job, *told(at[1], at[0], rank=1), ranks=2)
    assert valid(job) == [4 if at[0] == "forward" else 6]
    assert train_to_end(job, 2) == undisturbed(job, 2)


def test_stock_resumes_from_reprieves_checkpoint(plain: HfJob, stock: HfJob, tmp_path: Path) -> None:
    """It resumes as from its own checkpoint: the shards are the same."""
    stopped(plain, *told(4), ranks=2)
    for name in ("pytorch_model_fsdp_0", "optimizer_0"):
        saved, expected = (each.output / "checkpoint-4" / name for each in (plain, stock))
        assert sorted(path.name for path in saved.iterdir()) == SHARDS
        items = FileSystemReader(saved).read_metadata().storage_data.values()
        assert any(hasattr(item, DATA_OFFSET) for item in items), "stock has written it, and we once more"
        _assert_same(_by_stock(saved, tmp_path / "saved"), _by_stock(expected, tmp_path / "expected"))
    ends(replace(plain, safe=False, given=True), 2)
    assert after(plain, 4) == after(stock, 4)


def test_goes_on_from_stock(plain: HfJob, stock: HfJob) -> None:
    """Resume from stock's checkpoint as stock does."""
    shutil.copytree(stock.output / "checkpoint-4", plain.output / "checkpoint-4")
    assert "was not saved by Reprieve" in ends(plain, 2)
    assert after(plain, 4) == after(stock, 4)


def test_a_rank_whose_disk_is_full(job: HfJob) -> None:
    """The disk has space for one checkpoint."""
    often = job.but(save_strategy="steps", save_steps=2)
    results = attempt(often, full_disk(1, 400_000), ranks=2)
    assert [result.error and result.error.type for result in results] == ["RankFailed", "StorageFull"], str(results)
    assert "the periodic save before this one failed: write: rank 1: StorageFull" in results[0].output
    assert len(seen(job.folder)["losses-1.jsonl"]) == 12
    assert valid(job) == [2]
    assert _ending(train_to_end(often, 2)) == _ending(undisturbed(job, 2))


@pytest.mark.parametrize(
    "faults",
    [
        [fail(1, "publish scratch", FULL, nth=2)],
        [fail(0, "saved", FULL, nth=2)],
        [pause(0, "before plan", 0.5, nth=2), fail(0, "before plan", FULL, nth=2)],
    ],
    ids=["before", "after", "long after"],
)
def test_a_rank_that_cannot_save(job: HfJob, faults: list[Fault]) -> None:
    """It fails before or after the collectives of the trainer's code: training continues without that checkpoint."""
    results = attempt(job.but(save_strategy="steps", save_steps=2), *faults, ranks=2)
    for result in results:
        assert result.ok, str(result)
        assert "step 4 is not saved" in result.output
    assert valid(job) == [12, 10, 8, 6, 2]
    assert seen(job.folder) == undisturbed(job, 2)


def test_a_rank_that_fails_among_collectives(job: HfJob) -> None:
    """The other rank is stuck in a collective: the run ends in time and keeps its older checkpoint."""
    hasty = replace(job.but(save_strategy="steps", save_steps=2), options=(("rank_timeout", "3s"),))
    results = attempt(hasty, fail(1, "save", FULL, nth=2), ranks=2)
    assert not any(result.ok or result.timed_out for result in results), str(results)
    assert results[1].error is not None
    assert "No space left on device. The other ranks are stuck in the save" in results[1].error.message
    assert valid(job) == [2]


def test_another_number_of_ranks(job: HfJob) -> None:
    stopped(job, *told(3), ranks=2)
    assert (
        "the checkpoint has 2 × 1 × 4 samples in a step (ranks × batches × batch size), and this run has 3 × 1 × 4"
        in ends(job, 3)
    )


def test_the_best_model(job: HfJob) -> None:
    job = job.but(load_best_model_at_end=True, save_total_limit=1, learning_rate=3e-2, num_train_epochs=3)
    stopped(job, *told(8, rank=1), ranks=2)
    assert train_to_end(job, 2) == undisturbed(job, 2)


def test_all_gathered_on_a_rank(job: HfJob) -> None:
    """Resuming is as exact, and the cost is logged."""
    full = replace(job, sharded="FULL_STATE_DICT")
    assert "use SHARDED_STATE_DICT" in stopped(full, *told(4, rank=1), ranks=2)
    assert (job.output / "checkpoint-4" / "pytorch_model_fsdp.bin").exists()
    assert valid(job) == [4]
    assert train_to_end(full, 2) == undisturbed(job, 2)


def _by_stock(folder: Path, copy: Path) -> dict[str, Any]:
    """Merge all shards with torch's own converter."""
    dcp_to_torch_save(folder, copy)
    loaded: dict[str, Any] = torch.load(copy, weights_only=True)
    return loaded


def _assert_same(found: Any, expected: Any) -> None:
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key in expected:
            _assert_same(found[key], expected[key])
    elif isinstance(expected, torch.Tensor):
        assert torch.equal(found, expected)
    else:
        assert found == expected


def _ending(found: dict[str, Any]) -> dict[str, Any]:
    """Leave out the steps that were repeated."""
    return {name: what for name, what in found.items() if name.startswith("end")}
