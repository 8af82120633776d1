"""What the launcher says: to people on stderr, to a cluster in the termination log."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

_TERMINATION_LOG = "/dev/termination-log"
"""Kubernetes shows what is in it as the reason why a container ended."""
_LONGEST = 4096


def say(text: str) -> None:
    """One line. stderr may be closed, and a full pipe is not waited for longer than for the command's own output."""
    with contextlib.suppress(OSError):
        os.write(2, f"reprieve: {text}\n".encode(errors="replace"))


def last_words(text: str) -> None:
    say(text)
    path = Path(os.environ.get("REPRIEVE_TERMINATION_LOG", _TERMINATION_LOG))
    with contextlib.suppress(OSError):
        if path.exists():
            path.write_bytes(text.encode(errors="replace")[:_LONGEST])
