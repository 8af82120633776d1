"""Failpoints: named points in the code where a test can make something happen.

    reached("publish commit")

does nothing in production but check a variable. `reprieve.testing` sets that variable to a function that kills or
stalls the process at the failpoint that a scenario names.
"""

from __future__ import annotations

from collections.abc import Callable

on_reached: Callable[[str], object] | None = None
"""Called with the name of every failpoint, on the thread that reaches it. For tests only."""


def reached(name: str) -> None:
    """Report that this thread is at the failpoint `name`."""
    if on_reached is not None:
        on_reached(name)
