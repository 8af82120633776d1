"""What a stop saves, where saving is hard: shards, slow saves, fewer workers afterwards, ten stops in a row."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.support.jobs.ray_ways import SAMPLES
from tests.support.ray_lab import RayLab

pytestmark = pytest.mark.timeout(600)

RAY_LOOKS_FOR_NODES_S = 30
"""Elastic runs start with the nodes that Ray knew of at its last look, every 20 s (`TICK_INTERVAL_S`)."""


def test_relaxed_collectives_commit_no_checkpoint_without_a_shard(lab: RayLab) -> None:
    """FSDP2. Ray would commit without the workers of a drained node, which save late here."""
    lab.add_node(resource := lab.room())
    plan = [{"at": "forward", "step": 4, "target": "drain"}]
    ended = lab.run(way="shards", steps=9, plan=plan, save_s=3, relax_collectives=True, resource=resource)
    assert ended.code == 0, str(ended)
    restored = [line["restored"] for rank in range(2) for line in lab.lines(rank) if "restored" in line]
    assert restored == [["shard-0.pt", "shard-1.pt"]] * 2, str(ended)
    assert lab.steps(0) == lab.steps(1) == list(range(9)), str(ended)
    assert lab.failures_counted() == 0


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_a_save_longer_than_two_minutes_is_finished(soak: None, lab: RayLab) -> None:
    """Ray restarts the workers of a preemption without a deadline after 120 s."""
    plan = [{"at": "forward", "step": 2, "target": "rank 1"}]
    ended = lab.run(steps=5, plan=plan, stop_save_s=125)
    assert ended.code == 0, str(ended)
    lab.assert_nothing_lost(5, 2)
    assert lab.failures_counted() == 0


def test_an_elastic_run_continues_with_fewer_workers(lab: RayLab) -> None:
    """No sample of a pass is lost or seen twice, although half of the workers are gone."""
    lab.add_node(resource := lab.room(), workers=2)
    time.sleep(RAY_LOOKS_FOR_NODES_S)
    plan = [{"at": "forward", "step": 3, "target": "drain"}]
    ended = lab.run(way="samples", workers=2, max_workers=4, plan=plan, resource=resource)
    assert ended.code == 0, str(ended)
    assert [line["workers"] for line in lab.lines(0) if "started" in line] == [4, 2], str(ended)
    seen = [line for rank in range(4) for line in lab.lines(rank) if "samples" in line]
    for epoch in range(2):
        samples = [sample for line in seen if line["epoch"] == epoch for sample in line["samples"]]
        assert sorted(samples) == list(range(SAMPLES)), f"epoch {epoch}"
    assert lab.failures_counted() == 0


def test_an_upload_in_the_background_is_finished(lab: RayLab) -> None:
    """Also that of a periodic checkpoint before it. Ray ends uploads with the workers."""
    plan = [{"at": "forward", "step": 5, "target": "rank 1"}]
    ended = lab.run(steps=9, plan=plan, async_upload_s=1.5)
    assert ended.code == 0, str(ended)
    lab.assert_nothing_lost(9, 2)
    assert len(lab.completed()) == len(lab.starts()) - 1 == 1
    assert lab.failures_counted() == 0


def test_ten_stops_leave_nothing_behind(lab: RayLab) -> None:
    """Temporary folders, DataLoader workers and processes of the function are gone."""
    plan = [{"at": "upload", "step": 4 * number + 3, "target": f"rank {number % 2}"} for number in range(10)]
    temporary = lab.folder / "tmp"
    ended = lab.run(steps=44, every=4, plan=plan, loader_workers=1, temporary=str(temporary))
    assert ended.code == 0, str(ended)
    assert len(lab.starts()) == 11
    lab.assert_nothing_lost(44, 2)
    assert list(temporary.iterdir()) == []
    started = [line for rank in range(2) for line in lab.lines(rank) if "children" in line]
    assert all(line["children"] for line in started)
    for pid in {pid for line in started for pid in (line["pid"], *line["children"])}:
        lab.until(lambda pid=pid: not Path(f"/proc/{pid}").exists(), f"process {pid} is gone")
