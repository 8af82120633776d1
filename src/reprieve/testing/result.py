"""The result of a rank: what its function returned, or how its process ended."""

from __future__ import annotations

import signal
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Failure:
    """The exception that ended a rank's function."""

    type: str
    """The name of its class, without the module."""
    message: str
    traceback: str


@dataclass(frozen=True, slots=True)
class Result:
    """The result of one rank."""

    rank: int
    value: Any = None
    """What the function returned; None if it did not return."""
    error: Failure | None = None
    """What the function raised, including `SystemExit`."""
    exit_code: int | None = None
    """None if a signal ended the process."""
    signal: signal.Signals | None = None
    """The signal that ended the process."""
    timed_out: bool = False
    """The rank exceeded the timeout and was killed; `output` ends with the stacks of its threads."""
    seconds: float = 0.0
    """The run time of the process."""
    output: str = ""
    """The rank's stdout and stderr, including the traceback if it raised."""

    @property
    def ok(self) -> bool:
        """Whether the function returned and the process ended with exit code 0."""
        return self.error is None and self.exit_code == 0 and not self.timed_out

    def __str__(self) -> str:
        if self.ok:
            how = "returned"
        elif self.timed_out:
            how = f"timed out and was killed after {self.seconds:.1f} s"
        elif self.error is not None:
            how = f"raised {self.error.type}: {self.error.message}"
        elif self.signal is not None:
            how = f"was ended by {self.signal.name}"
        else:
            how = f"ended with exit code {self.exit_code}"
        summary = f"rank {self.rank} {how}"
        return summary if self.ok else f"{summary}\n{self.output}"


def values(results: Iterable[Result]) -> list[Any]:
    """Return what the ranks returned. If any did not, raise an AssertionError with tracebacks and output."""
    results = list(results)
    if failures := [str(result) for result in results if not result.ok]:
        raise AssertionError("\n\n".join(failures))
    return [result.value for result in results]
