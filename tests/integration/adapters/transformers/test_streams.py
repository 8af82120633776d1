"""Trainers that read shuffled streams of `datasets`, stopped and resumed.

Other kinds of streams are tested without a trainer, in tests/unit/data/test_hf_streams.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.hf_kit import stopped, train_to_end, undisturbed
from tests.support.jobs.hf_jobs import HfJob
from tests.support.jobs.stop_scenario_jobs import told


@pytest.mark.parametrize(
    ("nth", "shards", "workers", "options"),
    [
        (1, 4, 2, {}),
        (3, 2, 2, {}),
        (6, 4, 2, {"dataloader_persistent_workers": True}),
        (6, 4, 0, {}),
        (17, 4, 2, {}),
        (17, 1, 2, {}),
    ],
    ids=str,
)
def test_a_shuffled_stream(tmp_path: Path, nth: int, shards: int, workers: int, options: dict[str, Any]) -> None:
    """Stop at the first step, in the middle, and in the second pass, which starts with the 16th step."""
    job = HfJob(str(tmp_path / "job"), trainer="mlm", stream=True, shuffled=shards, workers=workers).but(**options)
    stopped(job, *told(nth))
    assert train_to_end(job) == undisturbed(job)


# With packing, stock supports only shards.
@pytest.mark.parametrize(("trainer", "dispatched"), [("mlm", True), ("mlm", False), ("packed", False)])
def test_a_shuffled_stream_on_two_ranks(tmp_path: Path, trainer: str, dispatched: bool) -> None:
    """One rank reads for both, or each reads its own shards."""
    job = HfJob(str(tmp_path / "job"), trainer=trainer, stream=True, shuffled=4, workers=2, samples=96)
    job = job.but(accelerator_config={"dispatch_batches": dispatched})
    stopped(job, *told(5, rank=1), ranks=2)
    assert train_to_end(job, 2) == undisturbed(job, 2)
