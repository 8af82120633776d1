"""The launcher's messages: to people on stderr, to a cluster in the termination log."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def print_message(text: str) -> None:
    """Print one line to stderr, which may be closed."""
    with contextlib.suppress(OSError):
        os.write(2, f"reprieve: {text}\n".encode(errors="replace"))


def print_exit_message(text: str) -> None:
    """Print how the run ended, and write it to the termination log where there is one."""
    print_message(text)
    from reprieve.progress.sinks import termination_log

    path = termination_log.path()
    with contextlib.suppress(OSError):
        if path.exists():
            # The progress that a rank has written stays: operators read it there.
            content = termination_log.with_message(_content(path), text)
            path.write_bytes(content or text.encode(errors="replace")[: termination_log.MAX_BYTES])


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
