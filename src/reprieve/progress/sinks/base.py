"""The seam between what is known of a run and whoever is told: files, servers, a terminal.

One contract suite runs over all sinks (tests/unit/test_progress_sinks.py).
"""

from __future__ import annotations

from typing import Protocol

from reprieve.progress.snapshot import Progress


class Sink(Protocol):
    """One way to tell progress. All calls come from one thread, which belongs to the sink: it may wait, and what it
    raises is logged and ends nothing. A call after one that failed tries again."""

    @property
    def name(self) -> str:
        """For messages: "the progress file /a/b.json"."""

    @property
    def every_s(self) -> float:
        """How often `update` is wanted."""

    def update(self, progress: Progress) -> None:
        """This is how far the run is."""

    def close(self, progress: Progress) -> None:
        """This is the last word. Called once, and by then there may be only a second left."""
