"""Fixtures of the unit tests."""

from __future__ import annotations

import pytest
from helpers import FakeClock


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()
