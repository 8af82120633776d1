"""The exit codes that users, shells and clusters rely on (docs/launch.md).

The training process, the launcher and the command line all exit with these.
"""

from __future__ import annotations

import signal

FINISHED = 0
NOT_FINISHED = 1
"""The script ended before its training was finished. Also: `reprieve verify` and others found a problem."""
USAGE_ERROR = 2
"""The command line could not be understood or carried out."""
PERMANENT_FAILURE = 42
"""An error that no restart cures, such as a wrong setting or a checkpoint of another model."""
CANNOT_EXECUTE = 126
COMMAND_NOT_FOUND = 127
"""As a shell exits."""
PREEMPTED = 128 + signal.SIGTERM
"""143, as a shell reports a process that SIGTERM ended: stopped, and resumable."""

_SIGTERM_CODES = (-signal.SIGTERM, PREEMPTED, 256 - signal.SIGTERM)
"""As the parent process sees it; as a shell and Reprieve exit; `sys.exit(-15)`, with which DeepSpeed's launcher passes
on the code of a rank."""


def is_sigterm(code: int) -> bool:
    """Return whether the exit code of a process means that SIGTERM ended it."""
    return code in _SIGTERM_CODES


def as_shell(code: int) -> int:
    """Return the code with which a shell reports a process: a negative one is the signal that killed it."""
    return code if code >= 0 else 128 - code
