"""Named points that the code passes, where a test can make something happen.

    reached("publish commit")

does nothing at all in production: one look at a variable. `reprieve.testing` puts a function there that kills or
stalls the process at the point a scenario names.
"""

from __future__ import annotations

from collections.abc import Callable

on_reached: Callable[[str], object] | None = None
"""What happens at every point, on the thread that reached it. For tests only."""


def reached(name: str) -> None:
    """The code is at the point `name`."""
    if on_reached is not None:
        on_reached(name)
