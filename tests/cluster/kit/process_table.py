"""Finds a text in the process table while something runs: secrets must not be there."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path


class ProcessTable:
    """Everything that `ps` could show of a text while the block runs: command lines, and who may read environments."""

    def __init__(self, text: str, *, every_s: float = 0.0) -> None:
        """`every_s`: the time between two looks; commands that end at once are only seen without any."""
        self._text = text.encode()
        self._every_s = every_s
        self._done = threading.Event()
        self.found: set[str] = set()
        self.samples = 0

    def __enter__(self) -> ProcessTable:
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(self._every_s):
            self.samples += 1
            for folder in Path("/proc").iterdir():
                if folder.name.isdigit():
                    for name in ("cmdline", "environ"):
                        with contextlib.suppress(OSError):
                            if self._text in (folder / name).read_bytes():
                                self.found.add(f"{name} of {(folder / 'cmdline').read_bytes()!r}")
