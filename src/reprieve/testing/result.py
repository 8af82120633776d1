"""What became of a rank."""

from __future__ import annotations

import signal
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception that ended a rank's function."""

    type: str
    """The name of its class, without the module."""
    message: str
    traceback: str


@dataclass(frozen=True, slots=True)
class Result:
    """What one rank returned, or how it ended."""

    rank: int
    value: Any = None
    """What the function returned; None where it did not return."""
    error: Failure | None = None
    """What it raised, `SystemExit` included."""
    exit_code: int | None = None
    """None where a signal ended the process."""
    signal: signal.Signals | None = None
    """The signal that ended the process."""
    timed_out: bool = False
    """It outlived the time-out and was killed; `output` ends with the stacks of its threads."""
    seconds: float = 0.0
    """From its start to its end."""
    output: str = ""
    """Its stdout and stderr; with the traceback, where it raised."""

    @property
    def ok(self) -> bool:
        """The function returned, and the process ended with code 0."""
        return self.error is None and self.exit_code == 0 and not self.timed_out

    def __str__(self) -> str:
        if self.ok:
            how = "returned"
        elif self.timed_out:
            how = f"was killed after {self.seconds:.1f} s, when its time was up"
        elif self.error is not None:
            how = f"raised {self.error.type}: {self.error.message}"
        elif self.signal is not None:
            how = f"was ended by {self.signal.name}"
        else:
            how = f"ended with code {self.exit_code}"
        first = f"rank {self.rank} {how}"
        return first if self.ok else f"{first}\n{self.output}"


def values(results: Iterable[Result]) -> list[Any]:
    """What the ranks returned, for tests in which all must: else an AssertionError with tracebacks and output."""
    results = list(results)
    if bad := [str(result) for result in results if not result.ok]:
        raise AssertionError("\n\n".join(bad))
    return [result.value for result in results]
