"""The ways in which transformers' own just-in-time checkpoints lose work, one test each; nothing is lost under ours.

`python -m benchmarks.hf_defects` runs the same scenarios with theirs, too.
"""

from __future__ import annotations

import pytest
from benchmarks.hf_defects import SCENARIOS, run


@pytest.mark.timeout(400)
@pytest.mark.parametrize("number", range(1, len(SCENARIOS) + 1), ids=[one.__name__ for one in SCENARIOS])
def test_nothing_is_lost_where(number: int) -> None:
    assert run(number, "reprieve") is None
