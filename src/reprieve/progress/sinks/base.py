"""The interface of sinks, which receive the progress of a run: files, servers, a terminal.

One contract suite runs over all sinks (tests/unit/progress/sinks/test_sinks.py).
"""

from __future__ import annotations

from typing import Protocol

from reprieve.progress.snapshot import Progress


class Sink(Protocol):
    """A receiver of progress.

    All calls come from one thread, which belongs to the sink: it may block. Errors are logged and end nothing; the call
    after a failed one tries again.
    """

    @property
    def name(self) -> str:
        """For messages: "the progress file /a/b.json"."""

    @property
    def every_s(self) -> float:
        """The number of seconds between two calls of `update`."""

    def update(self, progress: Progress) -> None:
        """Publish the current progress."""

    def close(self, progress: Progress) -> None:
        """Publish the last progress. Called once, with perhaps only a second left until the process exits."""
