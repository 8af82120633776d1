"""Retention: which checkpoints to keep, and the lock that keeps readers and removals apart.

No checkpoint is removed before a newer one is durable and has been read back and verified. The newest valid one always
stays. One that is being read stays until the next pass. Invalid ones do not count and are left to `resume`.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from reprieve.checkpoint.folder import commit
from reprieve.checkpoint.folder.catalog import CheckpointInfo
from reprieve.checkpoint.format.manifest import MANIFEST
from reprieve.errors import ConfigError
from reprieve.storage.disk import Disk


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """The rules for what to keep. A checkpoint stays if any of them applies."""

    keep: int | None = 3
    """The number of newest checkpoints to keep. None keeps all."""
    keep_every: int | None = None
    """Also keep each checkpoint whose step is a multiple of this."""
    best: tuple[str, str] | None = None
    """Also keep the best by a metric given to `save`: `("eval_loss", "min")` or `("accuracy", "max")`."""
    keep_requested: bool = False
    """Also keep all that the script's save strategy requested; they do not count towards `keep`."""

    def __post_init__(self) -> None:
        if self.keep is not None and self.keep < 1:
            raise ConfigError(f"keep={self.keep}: at least one checkpoint must stay. keep=None keeps all of them")
        if self.keep_every is not None and self.keep_every < 1:
            raise ConfigError(f"keep_every={self.keep_every}: give a number of steps, or None")
        if self.best is not None and (len(self.best) != 2 or self.best[1] not in ("min", "max")):
            raise ConfigError(f'best={self.best!r}: write it like ("eval_loss", "min")')

    def removable(
        self, checkpoints: Sequence[CheckpointInfo], run: str, saved: int, pinned: Collection[int | None] = ()
    ) -> list[CheckpointInfo]:
        """The checkpoints of the run that no rule keeps, oldest first; never the step that was just saved, nor pinned
        ones. Pinned ones count towards `keep`, as a Trainer's best checkpoint does towards `save_total_limit`.

        Checkpoints of other runs and other tools are never removable.
        """
        of_run = (each for each in checkpoints if each.problem is None and each.manifest and each.manifest.run == run)
        valid = sorted(of_run, key=lambda checkpoint: -checkpoint.step)
        if self.keep_requested:
            valid = [each for each in valid if each.manifest is not None and each.manifest.unrequested]
        if self.keep is None or len(valid) <= self.keep:
            return []
        steps = [checkpoint.step for checkpoint in valid]
        kept = {saved, *pinned} & set(steps)
        others = [step for step in steps if step not in kept]
        kept |= set(others[: max(0, self.keep - len(kept))])
        if self.keep_every is not None:
            kept |= {step for step in steps if step % self.keep_every == 0}
        if self.best is not None:
            metric, mode = self.best
            scores = [
                (each.manifest.metrics[metric], each.step)
                for each in valid
                if each.manifest is not None and metric in each.manifest.metrics
            ]
            if scores:
                kept.add((min if mode == "min" else max)(scores)[1])
        return [checkpoint for checkpoint in reversed(valid) if checkpoint.step not in kept]


def hide_unless_read(disk: Disk, path: Path) -> Path | None:
    """Take a checkpoint's name away. Returns the folder that is left to remove; None if it is being read."""
    with _locked_against_readers(path) as locked:
        return commit.hide(disk, path) if locked else None


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """While inside, neither this nor another process prunes the checkpoint."""
    try:
        fd = os.open(path / MANIFEST, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:  # a foreign checkpoint has nothing to lock, and is never pruned
        yield
        return
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        yield
    finally:
        os.close(fd)


@contextlib.contextmanager
def _locked_against_readers(path: Path) -> Iterator[bool]:
    """Yields False if the checkpoint is being read; True also where there are no locks."""
    try:
        fd = os.open(path / MANIFEST, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        yield True
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        yield False
    except OSError:
        yield True
    else:
        yield True
    finally:
        os.close(fd)
