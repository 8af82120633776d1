"""A failing test leaves no process behind, and two workers run all tests that fork trainers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import ModuleType
from zlib import crc32

import pytest

from tests.support.launch_kit import end_what_still_runs

SOAK = bool(os.environ.get("REPRIEVE_SOAK"))
WORKERS = 2
"""With one, it would be busy long after the others."""
KITS = ("tests.support.finetune_kit", "tests.support.hf_kit")
"""What forks trainers for a test, as does a call with `modules=PRELOAD`."""


@pytest.fixture(autouse=True)
def _no_process_is_left() -> Iterator[None]:
    """The next tests share the machine, and some inspect its processes."""
    yield
    end_what_still_runs()


@pytest.hookimpl(tryfirst=True)  # xdist reads the groups: after this, also where a single file was named to pytest
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What they fork from takes longer to import than most of them, and they share what undisturbed jobs have seen.

    Long variants take longer than that, and run in all workers.
    """
    for item in items:
        if not SOAK and isinstance(item, pytest.Function) and _forks_trainers(item.module):
            item.add_marker(pytest.mark.xdist_group(f"trainers-{crc32(item.module.__name__.encode()) % WORKERS}"))


def _forks_trainers(module: ModuleType) -> bool:
    return hasattr(module, "PRELOAD") or any(getattr(each, "__module__", "") in KITS for each in vars(module).values())
