"""The benchmark of stops: its arithmetic, and one real stop of two ranks."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from benchmarks.stop import stop_ranks
from benchmarks.stop_process import BEGUN, DURABLE, Stopped


def _stopped(*ranks: tuple[list[tuple[float, float]], float], at: float) -> Stopped:
    notes = [{"steps": steps, "moments": {BEGUN: begun, DURABLE: begun + 2}} for steps, begun in ranks]
    return Stopped(at, at + 5, [143] * len(ranks), notes)


def test_reaction_is_counted_from_the_end_of_the_step_that_was_running() -> None:
    stopped = _stopped(([(0.0, 1.0), (1.0, 2.0)], 2.25), at=1.5)
    assert stopped.reaction_ms == 250
    assert stopped.durable_s == 2.75
    assert stopped.exit_s == 5


def test_a_step_more_than_needed_counts_as_reaction() -> None:
    assert _stopped(([(0.0, 1.0), (1.0, 2.0), (2.0, 3.0)], 3.25), at=1.5).reaction_ms == 1250


def test_between_two_steps_reaction_is_counted_from_the_signal() -> None:
    assert _stopped(([(0.0, 1.0)], 1.5), at=1.25).reaction_ms == 250


def test_of_several_ranks_the_last_counts() -> None:
    ranks = ([(0.0, 1.0)], 1.25), ([(0.0, 1.5)], 2.0)
    assert _stopped(*ranks, at=0.5).reaction_ms == 500


@pytest.mark.timeout(60)
def test_a_real_stop(tmp_path: Path) -> None:
    stopped = stop_ranks(tmp_path / "job", 2, random.Random(0))
    assert stopped.exit_codes == [143, 143]
    assert 0 < stopped.reaction_ms / 1000 < stopped.durable_s < stopped.exit_s
    assert stopped.step_s >= 0.02
