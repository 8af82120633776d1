"""What the launcher says: to people on stderr, to a cluster in the termination log."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def print_message(text: str) -> None:
    """One line. stderr may be closed, and a full pipe is not waited for longer than for the command's own output."""
    with contextlib.suppress(OSError):
        os.write(2, f"reprieve: {text}\n".encode(errors="replace"))


def exit_message(text: str) -> None:
    print_message(text)
    from reprieve.progress.sinks import termination_log

    path = termination_log.path()
    with contextlib.suppress(OSError):
        if path.exists():
            # What a rank has told of its progress stays: operators read it there.
            told = termination_log.with_message(_content(path), text)
            path.write_bytes(told or text.encode(errors="replace")[: termination_log.LONGEST])


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
