"""Shows Reprieve's log records on stderr, with a prefix and once for all ranks, where the script configures no logging.

Python alone would print the bare message on every rank. A session calls `show_logs` when it begins; nothing is
installed at import. The handler is silent as soon as any other handler receives these records.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys

ONE_RANK = {"one_rank": True}
"""`extra` of a record that concerns this rank alone: it is shown, though the other ranks log nothing like it."""

log = logging.getLogger("reprieve")


class Fallback(logging.Handler):
    """A handler of last resort for Reprieve's logger, like `logging.lastResort` for all loggers."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.rank = 0
        self.shows_every_rank = False
        """For ranks that do not share a stderr (`reprieve.testing`)."""

    def emit(self, record: logging.LogRecord) -> None:
        if self._is_handled_elsewhere() or not self._is_shown(record):
            return
        sender = f"reprieve: rank {self.rank}: " if self.rank else "reprieve: "
        with contextlib.suppress(Exception):  # stderr may be closed, and training must not fail for that
            sys.stderr.write(f"{sender}{self.format(record)}\n")
            sys.stderr.flush()

    def _is_shown(self, record: logging.LogRecord) -> bool:
        return (
            self.rank == 0
            or self.shows_every_rank
            or record.levelno >= logging.ERROR
            or getattr(record, "one_rank", False)
        )

    def _is_handled_elsewhere(self) -> bool:
        """Look for handlers as `logging` does: this logger, then its parents while records propagate."""
        logger: logging.Logger | None = log
        while logger is not None:
            if any(handler is not self for handler in logger.handlers):
                return True
            logger = logger.parent if logger.propagate else None
        return False


fallback = Fallback()


def show_logs(rank: int | None = None) -> None:
    """Show log records from now on. `rank`: the rank of this process; default: `RANK`."""
    if rank is None:
        text = os.environ.get("RANK", "")
        rank = int(text) if text.isdigit() else 0
    fallback.rank = rank
    log.addHandler(fallback)  # added once, however often this is called
