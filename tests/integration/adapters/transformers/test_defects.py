"""The ways in which transformers' just-in-time checkpoints lose work, one test each. Reprieve loses nothing.

`python -m benchmarks.hf_defects` runs the same scenarios with transformers' own, too.
"""

from __future__ import annotations

import os

import pytest
from benchmarks import hf_defects
from benchmarks.hf_defects import SCENARIOS, run

from tests.support.places import HIDE_OPTIONAL

SOAK = bool(os.environ.get("REPRIEVE_SOAK"))

COVERED = {
    hf_defects.exit_code_says_failure,  # by test_launch.py and test_early_stops.py in launch/, with torchrun
    hf_defects.one_rank_is_told,  # by test_ranks.py, with forked ranks
    hf_defects.other_ranks_silently,  # by test_ranks.py, with forked ranks
}
"""What other tests show in less time: each of these starts torchrun, whose ranks import the Trainer."""

NUMBERS = [number for number, scenario in enumerate(SCENARIOS, 1) if SOAK or scenario not in COVERED]


@pytest.mark.soak
@pytest.mark.timeout(400)
@pytest.mark.parametrize("number", NUMBERS, ids=lambda number: SCENARIOS[number - 1].__name__)
def test_nothing_is_lost_where(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in HIDE_OPTIONAL.items():
        monkeypatch.setenv(name, value)
    assert run(number, "reprieve") is None
