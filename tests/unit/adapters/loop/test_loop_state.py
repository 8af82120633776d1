"""The stored state of a loop: its keys, its versions, and another number of ranks."""

from __future__ import annotations

from typing import Any

import pytest

import reprieve
from reprieve.adapters.loop.loop_state import LoopState, PassState

STORED: dict[str, Any] = {
    "steps": 6,
    "epoch": 1,
    "world_size": 2,
    "passes": [{"batch": 4, "state": None}, {"batch": 2, "state": {"consumed": 2}}],
    "sources": [{"generator": 1}],
    "tail": True,
    "metrics": {"loss": 0.5},
    "ddp": {"model": ["weight", "bias"]},
}
"""As versions before the first with a "version" wrote it."""


def test_the_keys_are_those_of_earlier_versions() -> None:
    assert LoopState.from_state(STORED).to_state() == {"version": 1, **STORED}


def test_a_version_is_read_back() -> None:
    state = LoopState.from_state(STORED)
    assert LoopState.from_state(state.to_state()) == state


def test_a_newer_version_is_refused() -> None:
    with pytest.raises(reprieve.StateMismatch, match="in version 2, and this version of Reprieve reads version 1"):
        LoopState.from_state({**STORED, "version": 2})


def test_a_state_that_lacks_a_key_is_refused() -> None:
    with pytest.raises(reprieve.StateMismatch, match="has no 'tail'"):
        LoopState.from_state({key: value for key, value in STORED.items() if key != "tail"})


def test_another_number_of_ranks_has_as_many_samples_behind_it(caplog: pytest.LogCaptureFixture) -> None:
    state = LoopState.from_state(STORED)
    assert state.for_world_size(2) is state
    divided = state.for_world_size(1)
    assert (divided.world_size, divided.sources) == (1, [])
    assert divided.passes == [PassState(4, None), PassState(4, {"consumed": 4})]
    assert "written by 2 ranks, and this run has 1" in caplog.text
