"""The ways in which transformers' just-in-time checkpoints lose work, one test each. Reprieve loses nothing.

`python -m benchmarks.hf_defects` runs the same scenarios with transformers' own, too.
"""

from __future__ import annotations

import pytest
from benchmarks.hf_defects import SCENARIOS, run

from tests.support.places import HIDE_OPTIONAL


@pytest.mark.timeout(400)
@pytest.mark.parametrize("number", range(1, len(SCENARIOS) + 1), ids=[scenario.__name__ for scenario in SCENARIOS])
def test_nothing_is_lost_where(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in HIDE_OPTIONAL.items():
        monkeypatch.setenv(name, value)
    assert run(number, "reprieve") is None
