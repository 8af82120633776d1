"""Progress on stderr, with the seconds since the command began."""

from __future__ import annotations

import sys
import time

_BEGAN = time.monotonic()


def report(message: str) -> None:
    print(f"{time.monotonic() - _BEGAN:6.1f} s  {message}", file=sys.stderr, flush=True)
