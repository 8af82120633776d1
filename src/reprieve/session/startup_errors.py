"""Errors before there is a session: wrong options.

The launcher, or without one the termination log, gets a report of a permanent failure, and the process exits with 42.
Adapters wrap the reading of their options in `reporting_startup_errors`; later errors are reported by the session
(`Session.refused`).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from reprieve.errors import is_permanent
from reprieve.launcher_protocol import Refused, Reporter
from reprieve.preemption.process_exit import process_exit
from reprieve.progress.failure_reason import reason, whole_reason
from reprieve.progress.sinks import termination_log
from reprieve.run_state import RunState


@contextlib.contextmanager
def reporting_startup_errors() -> Iterator[None]:
    """Report a permanent failure inside the block, and raise it."""
    process_exit.prepare()
    try:
        yield
    except Exception as error:
        if is_permanent(error):
            reporter = Reporter(_int_from_env("RANK", 0), _int_from_env("WORLD_SIZE", 1))
            if not reporter.send(Refused(error=whole_reason(error))):
                termination_log.add_message(reason(error), RunState.FAILED, step=0)
            reporter.close()
        raise


def _int_from_env(variable: str, default: int) -> int:
    text = os.environ.get(variable, "")
    return int(text) if text.isdecimal() else default
