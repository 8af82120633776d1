"""Parses durations and sizes as people write them ("5m", "50GB"), and formats them for messages."""

from __future__ import annotations

import re
from datetime import timedelta

from reprieve.errors import ConfigError

_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|d)")
_SECONDS = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86400}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?", re.IGNORECASE)


def parse_duration(text: str | float | timedelta) -> timedelta:
    """Convert `"90s"`, `"5m"`, `"1h30m"`, a number of seconds or a timedelta. Zero and less raise ConfigError."""
    if isinstance(text, str):
        parts = _DURATION.findall(text)
        if not parts or _DURATION.sub("", text).strip():
            raise ConfigError(f"{text!r} is not a duration: write it like '30s', '5m' or '1h30m'")
        seconds: float | timedelta = sum(float(number) * _SECONDS[unit] for number, unit in parts)
    else:
        seconds = text
    try:
        duration = seconds if isinstance(seconds, timedelta) else timedelta(seconds=seconds)
    except (ValueError, OverflowError):
        raise ConfigError(f"{text!r} is not a duration: use a finite number of seconds") from None
    if duration <= timedelta(0):
        raise ConfigError(f"the duration {text!r} must be more than zero")
    return duration


def parse_size(text: str | int) -> int:
    """Convert `"50GB"`, `"256MiB"` or a number of bytes to bytes."""
    if isinstance(text, int):
        return text
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"{text!r} is not a size: write it like '256MiB' or '50GB'")
    number, prefix, binary = match.groups()
    return int(float(number) * (1024 if binary else 1000) ** " kmgt".index(prefix.lower() or " "))


def format_size(count: float) -> str:
    """Format a number of bytes: `1.49 GB`. Units are decimal, as for disks and bandwidths."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(count) < 1000 or unit == "TB":
            break
        count /= 1000
    return f"{count:.0f} {unit}" if unit == "B" else f"{count:.3g} {unit}"


def format_duration(seconds: float) -> str:
    """A duration for people: `1 h 05 min`, `3 min 20 s`, `8.2 s`. Whole seconds stay whole: `8 s`."""
    if seconds < 60:
        return f"{seconds} s" if isinstance(seconds, int) else f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"
