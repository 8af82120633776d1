"""The launcher's messages: to people on stderr, to a cluster in the termination log."""

from __future__ import annotations

import contextlib
import os

from reprieve.run_state import RunState


def print_message(text: str) -> None:
    """Print one line to stderr, which may be closed."""
    with contextlib.suppress(OSError):
        os.write(2, f"reprieve: {text}\n".encode(errors="replace"))


def print_exit_message(text: str, state: RunState, step: int = 0) -> None:
    """Print how the run ended, and write it to the termination log where there is one."""
    print_message(text)
    write_exit_message(text, state, step)


def write_exit_message(text: str, state: RunState, step: int = 0) -> None:
    """Write how the run ended to the termination log where there is one, without secrets."""
    from reprieve.progress.failure_reason import without_secrets
    from reprieve.progress.sinks import termination_log

    # The training process does not know whether a stop was a preemption or a pause, and neither do readers of its log.
    known = {RunState.PREEMPTED: RunState.STOPPED, RunState.PAUSED: RunState.STOPPED, RunState.HUNG: RunState.FAILED}
    termination_log.add_message(without_secrets(text), known.get(state, state), step)
