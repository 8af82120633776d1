"""The progress file: JSON that an operator, or a person with `cat`, can read at any moment."""

from __future__ import annotations

import contextlib
import secrets
from pathlib import Path

from reprieve.clock import Clock, SystemClock
from reprieve.progress.formats import progress_json
from reprieve.progress.snapshot import Progress
from reprieve.storage.disk import Disk

_POLL_INTERVAL_S = 1.0
_MAX_INTERVAL_S = 10.0
"""The file is written at least this often if anything changed, also while a step takes minutes."""
_LEFTOVER_AGE_S = 60.0
"""A temporary file of this age was left behind by a killed process: a live one renames it within milliseconds."""
_MODE = 0o644
"""Readable for all: readers are often other users, in other containers."""


class FileSink:
    """Writes the progress file. It is written beside and renamed, so that readers never see half of it."""

    every_s = _POLL_INTERVAL_S

    def __init__(
        self, path: str | Path, *, every_steps: int = 1, clock: Clock | None = None, disk: Disk | None = None
    ) -> None:
        """`every_steps`: the number of steps between two writes, which are at least a second apart."""
        self._path = Path(path).expanduser().absolute()
        # A process that is about to exit may still write, too. Its pid is no difference: in pods they are often equal.
        self._temporary = self._path.with_name(f".{self._path.name}.{secrets.token_hex(8)}.new")
        self._every_steps = every_steps
        self._clock = clock or SystemClock()
        self._disk = disk or Disk()
        self._last: Progress | None = None
        self._written_at = 0.0

    @property
    def name(self) -> str:
        return f"the progress file {self._path}"

    def update(self, progress: Progress) -> None:
        if self._is_due(progress):
            self._write(progress)

    def close(self, progress: Progress) -> None:
        self._write(progress)

    def _is_due(self, progress: Progress) -> bool:
        last = self._last
        if last is None or progress.state != last.state or progress.checkpoints.latest != last.checkpoints.latest:
            return True
        if progress.step - last.step >= self._every_steps or progress.step < last.step:
            return True
        waited = self._clock.monotonic() - self._written_at
        return progress != last and waited >= _MAX_INTERVAL_S

    def _write(self, progress: Progress) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            self._disk.remove(self._temporary)
        self._disk.write_file(
            self._temporary, progress_json.dumps(progress_json.for_file(progress), indent=2) + b"\n", flush=False
        )
        self._temporary.chmod(_MODE)
        self._disk.rename(self._temporary, self._path)
        if self._last is None:
            self._remove_leftovers()
        self._last, self._written_at = progress, self._clock.monotonic()

    def _remove_leftovers(self) -> None:
        """Remove the temporary files of writers that were killed."""
        for path in self._path.parent.iterdir():
            if path.name.startswith(f".{self._path.name}.") and path.suffix == ".new":
                with contextlib.suppress(OSError):  # another process may remove it, too
                    if self._clock.time() - path.stat().st_mtime > _LEFTOVER_AGE_S:
                        self._disk.remove(path)
