"""Fixtures of the unit tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from reprieve.launcher_protocol import Listener
from reprieve.progress import publisher
from tests.support.helpers import FakeClock

SLOW = (
    "adapters/ray/test_snapshot.py",
    "checkpoint/restore/test_bitflips.py",
    "checkpoint/save/test_property.py",
    "data/test_accelerate_loader.py",
    "data/test_hf_streams.py",
    "data/test_torch_loader.py",
    "data/test_workers.py",
    "launch/import_hook/test_finder.py",
    "ranks/test_stores.py",
)
"""Modules that take more than 15 s: `make test-fast` leaves them out."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here) and item.path.relative_to(here).as_posix() in SLOW:
            item.add_marker(pytest.mark.slow)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let publishers wait for their sinks as long as a busy machine needs."""
    monkeypatch.setattr(publisher, "_CLOSE_TIMEOUT_S", 30.0)


@pytest.fixture
def listener() -> Iterator[Listener]:
    """The launcher's end of the protocol."""
    listener = Listener()
    yield listener
    listener.close()


@pytest.fixture
def nan_in_fresh_memory() -> Iterator[None]:
    """Fill uninitialised tensors with NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
