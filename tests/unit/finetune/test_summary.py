"""The summary of a job: losses as a curve and a picture, and what interruptions have cost."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from PIL import Image

from reprieve.checkpoint.folder.attempts import AttemptRecord, write
from reprieve.finetune.loss_curve import draw_png, draw_text
from reprieve.finetune.summary import Interruptions, count_interruptions, lines, summarize
from reprieve.finetune.summary import write as write_summary
from reprieve.run_state import RunState
from reprieve.storage.disk import Disk

LOG = [
    {"step": 1, "loss": 4.0, "num_tokens": 100.0},
    {"step": 2, "loss": 2.0, "num_tokens": 200.0},
    {"step": 2, "eval_loss": 3.0},
    {"step": 2, "train_runtime": 4.0, "train_loss": 3.0},
]


def test_a_curve() -> None:
    assert draw_text([(1, 4.0), (2, 3.0), (3, 2.0)], height=2) == ["4 ┤█▁", "2 ┤██▁", "   step 1 3"]
    assert draw_text([]) == []


def test_a_curve_of_many_points_is_as_wide_as_it_may_be() -> None:
    drawn = draw_text([(step, 1000.0 - step) for step in range(1000)], width=50, height=4)
    assert max(map(len, drawn)) == 50 + len("974.5 ┤".replace("974.5", "989.5"))
    assert len(drawn) == 5


@pytest.mark.parametrize("points", [[(1, 2.0)], [(1, 2.0), (2, 2.0)], [(1, 4.0), (9, 1.0)]])
def test_a_picture(points: list[tuple[int, float]]) -> None:
    image = Image.open(io.BytesIO(draw_png(points, points[:1])))
    assert image.size == (900, 480)
    assert len(image.getcolors(10_000) or []) > 3


def test_what_is_reported(tmp_path: Path) -> None:
    found = summarize(LOG, 2, 1.0, Interruptions(count=2, lost_s={"preempted": 3.0, "failed": 1.5}))
    assert (found.tokens, found.tokens_per_s, found.losses) == (200, 50.0, [(1, 4.0), (2, 2.0)])
    shown = lines(found)
    assert shown[-2:] == [
        "2 steps, 1 epochs; loss 4 → 2; evaluation 3; 200 tokens, 50 a second",
        "2 interruptions survived, 4.5 s lost",
    ]
    write_summary(found, tmp_path)
    assert json.loads((tmp_path / "summary.json").read_text())["lost_s"] == {"preempted": 3.0, "failed": 1.5}
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_interruptions_from_the_record_of_attempts(tmp_path: Path) -> None:
    (tmp_path / ".reprieve").mkdir()
    attempts = [
        AttemptRecord(0.0, training=10.0, kept_until=20.0, ended=21.0, cause=RunState.PREEMPTED, launcher="a"),
        AttemptRecord(25.0, training=30.0, kept_until=33.0, ended=35.0, cause=RunState.FAILED, launcher="b"),
        AttemptRecord(36.0, training=40.0, launcher="c", ended=50.0, kept_until=50.0, cause=RunState.FINISHED),
    ]
    write(Disk(), tmp_path, attempts)
    found = count_interruptions(tmp_path, now=50.0)
    assert found == Interruptions(count=2, lost_s={"preempted": 10.0, "failed": 7.0})


def test_without_a_record(tmp_path: Path) -> None:
    assert count_interruptions(tmp_path) == Interruptions(count=0)
    assert lines(summarize([], 0, 0.0, Interruptions(count=1)))[-1].startswith(
        "1 interruption survived; `reprieve run`"
    )
    assert lines(summarize([], 0, 0.0, Interruptions(count=0)))[-1] == "no interruptions"
