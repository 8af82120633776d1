"""A failing test leaves no process behind: the next tests share the machine, and some inspect its processes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.launch_kit import end_what_still_runs


@pytest.fixture(autouse=True)
def _no_process_is_left() -> Iterator[None]:
    yield
    end_what_still_runs()
