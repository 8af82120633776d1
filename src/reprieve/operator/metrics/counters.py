"""Counts of what the operator has done, for its metrics."""

from __future__ import annotations

from collections import Counter


class Counters:
    """Counts by name and labels."""

    def __init__(self) -> None:
        self._counts: dict[str, Counter[tuple[tuple[str, str], ...]]] = {}

    def declare(self, name: str, **labels: str) -> None:
        """Start at 0: a rate needs a first value."""
        self._counts.setdefault(name, Counter())[tuple(labels.items())] += 0

    def add(self, name: str, **labels: str) -> None:
        self._counts.setdefault(name, Counter())[tuple(labels.items())] += 1

    def of(self, name: str) -> dict[tuple[tuple[str, str], ...], int]:
        return dict(self._counts.get(name, {}))
