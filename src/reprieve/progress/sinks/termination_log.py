"""The termination log: what Kubernetes keeps of a container when it is gone, and shows as the reason.

Written when the run has ended, and after a stop too: a preempted pod would otherwise leave nothing behind.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from reprieve.progress.formats import progress_json
from reprieve.progress.snapshot import Progress

LONGEST = 4096
"""Kubernetes cuts off what is longer, and half a JSON object is none."""


def path(env: Mapping[str, str] = os.environ) -> Path:
    return Path(env.get("REPRIEVE_TERMINATION_LOG") or "/dev/termination-log")


class TerminationSink:
    """Only where the file is there already: the kubelet makes it, and nobody reads another."""

    every_s = 1.0

    def __init__(self, log: str | Path) -> None:
        self._path = Path(log)
        self._written = False

    @property
    def name(self) -> str:
        return f"the termination log {self._path}"

    def update(self, progress: Progress) -> None:
        """The process may be ended without a further word."""
        if progress.ended and not self._written:
            self._write(progress)

    def close(self, progress: Progress) -> None:
        self._write(progress)

    def _write(self, progress: Progress) -> None:
        if self._path.exists():
            self._path.write_bytes(message(progress))  # in place: it is a mount
        self._written = True


def message(progress: Progress) -> bytes:
    """The most that fits."""
    return _fitting(progress_json.for_http(progress))


def with_message(told: bytes, text: str) -> bytes | None:
    """What a run told, with the launcher's last words; None if it told nothing."""
    try:
        found = json.loads(told)
    except ValueError:
        return None
    if not isinstance(found, dict) or not {"trainMetrics", "evalMetrics", "checkpointing"} <= found.keys():
        return None
    return _fitting({**found, "message": text})


def _fitting(told: dict[str, Any]) -> bytes:
    data = b""
    for smaller in _ever_smaller(told):
        data = progress_json.dumps(smaller)
        if len(data) <= LONGEST:
            break
    return data


def _ever_smaller(told: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Numbers that a person chose the names of go first, then texts; what is left at last is short."""
    yield told
    for most in (16, 4, 0):
        for metrics in ("trainMetrics", "evalMetrics"):
            told = {**told, metrics: dict(list(told[metrics].items())[:most])}
        yield told
    for most in (100, 0):
        for text in ("reason", "message"):
            if told.get(text):
                told = {**told, text: told[text][:most]}
        yield told
    yield {**told, "checkpointing": {**told["checkpointing"], "latestCheckpoint": None}}
