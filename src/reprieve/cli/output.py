"""How commands print: tables and JSON to stdout, everything else to stderr.

What is printed is printed as it is, since paths and names may have brackets in them; what has a colour is a `Text`.
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


def ago(moment: datetime) -> str:
    seconds = (datetime.now(timezone.utc) - moment).total_seconds()
    for name, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {name} ago"
    return f"{max(0, seconds):.0f} s ago"


def duration(seconds: float) -> str:
    """`1 h 05 min`, `3 min 20 s`, `8.2 s`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    if seconds < 3600:
        return f"{seconds // 60:.0f} min {seconds % 60:02.0f} s"
    return f"{seconds // 3600:.0f} h {seconds % 3600 // 60:02.0f} min"
