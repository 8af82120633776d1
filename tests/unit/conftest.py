"""Fixtures of the unit tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from reprieve.launcher_protocol import Listener
from reprieve.progress import publisher
from tests.support.helpers import FakeClock


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Publishers wait for their sinks as long as a busy machine needs."""
    monkeypatch.setattr(publisher, "_CLOSE_S", 30.0)


@pytest.fixture
def listener() -> Iterator[Listener]:
    """The launcher's end of the protocol."""
    listener = Listener()
    yield listener
    listener.close()


@pytest.fixture
def nan_in_fresh_memory() -> Iterator[None]:
    """What nobody filled is NaN, not what happened to lie there."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
