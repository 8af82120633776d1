"""The output of commands: tables and JSON go to stdout, everything else to stderr.

Texts are printed without markup, since paths and names may contain brackets. Coloured text is a `Text`.
"""

from __future__ import annotations

import json
import sys
from datetime import datetime, timezone
from typing import Any

from rich.console import Console

data = Console(soft_wrap=True, markup=False, emoji=False, highlight=False, width=None if sys.stdout.isatty() else 200)
talk = Console(soft_wrap=True, markup=False, emoji=False, highlight=False, stderr=True)


def print_json(value: Any) -> None:
    json.dump(value, sys.stdout, indent=2, sort_keys=True)
    sys.stdout.write("\n")


def ago(at: datetime) -> str:
    """Return how long ago a moment was: `5 min ago`."""
    seconds = (datetime.now(timezone.utc) - at).total_seconds()
    for name, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {name} ago"
    return f"{max(0, seconds):.0f} s ago"
