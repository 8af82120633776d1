"""Before there is a session: what is refused then is told to the launcher, too, and ends the process with 42."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from reprieve.errors import is_permanent
from reprieve.launcher_protocol import Refused, Reporter
from reprieve.preemption.process_exit import process_exit


@contextlib.contextmanager
def reporting_startup_errors() -> Iterator[None]:
    """Around what looks at options."""
    process_exit.prepare()
    try:
        yield
    except Exception as error:
        if is_permanent(error):
            reporter = Reporter(_number("RANK", 0), _number("WORLD_SIZE", 1))
            reporter.send(Refused(error=f"{type(error).__name__}: {error}"))
            reporter.close()
        raise


def _number(variable: str, default: int) -> int:
    text = os.environ.get(variable, "")
    return int(text) if text.isdecimal() else default
