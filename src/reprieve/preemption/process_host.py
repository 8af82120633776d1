"""The seam for frameworks that own the training processes, such as Ray: who stops a process, and who ends it.

A run in such a process takes its stop requests from the host instead of from signals, and hands the process back to it
instead of ending it (`process_exit.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from reprieve.preemption.deadline import Grace

if TYPE_CHECKING:
    from reprieve.preemption.process_exit import Preempted


@dataclass(frozen=True, slots=True)
class StopRequest:
    """Why a run must stop, and until when."""

    reason: str
    at: float
    """When the request came, by `time.monotonic`."""
    deadline: float | None
    """When the process is killed, by `time.monotonic`; None: no deadline is known."""
    certain: bool = False
    """The deadline is configured or announced, and not only a default of the platform."""
    signal: int | None = None

    def remaining_s(self) -> float | None:
        """Return the seconds until the deadline, or None if no deadline is known."""
        return None if self.deadline is None else self.deadline - time.monotonic()


StopRequestListener = Callable[[StopRequest], None]


class ProcessHost(Protocol):
    """The framework that owns this process."""

    @property
    def grace(self) -> Grace:
        """The grace period of a stop, where the request has no deadline of its own."""

    def subscribe(self, listener: StopRequestListener) -> None:
        """Call `listener` with the stop request, now if there is one, and again if its deadline moves closer."""

    def unsubscribe(self, listener: StopRequestListener) -> None:
        """Stop calling `listener`."""

    def stopped(self, stopped: Preempted) -> None:
        """Note how the run has stopped. It raises this exception next, and its code unwinds. Callable from any
        thread."""

    def hand_back(self) -> None:
        """Note that the run no longer needs this process. Callable from any thread, any number of times."""
