"""Which checkpoints may go, and taking them away.

Nothing goes before a newer one is durable and was read back and verified; the newest valid one never goes; one that
is being read stays until the next time; what is not valid is nobody's reserve and is left for `resume` to deal with.
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
    """What to keep. A checkpoint stays if any of these wants it."""

    keep: int | None = 3
    """The newest so many. None keeps all of them."""
    keep_every: int | None = None
    """Besides, each whose step is a multiple of this."""
    best: tuple[str, str] | None = None
    """Besides, the best by a metric given to `save`: `("eval_loss", "min")` or `("accuracy", "max")`."""
    keep_requested: bool = False
    """Besides, all that the script's save strategy asked for; they do not count towards `keep`."""

    def __post_init__(self) -> None:
        if self.keep is not None and self.keep < 1:
            raise ConfigError(f"keep={self.keep}: at least one checkpoint must stay. keep=None keeps all of them")
        if self.keep_every is not None and self.keep_every < 1:
            raise ConfigError(f"keep_every={self.keep_every}: give a number of steps, or None")
        if self.best is not None and (len(self.best) != 2 or self.best[1] not in ("min", "max")):
            raise ConfigError(f'best={self.best!r}: write it like ("eval_loss", "min")')

    def removable(
        self, found: Sequence[CheckpointInfo], run: str, saved: int, pinned: Collection[int | None] = ()
    ) -> list[CheckpointInfo]:
        """Those of the run that nothing wants any more, oldest first; never the step that was just saved, nor those
        that are pinned. These count towards `keep`, as a Trainer's best checkpoint does towards `save_total_limit`.

        What other runs and other tools wrote is not ours to remove.
        """
        ours = (one for one in found if one.problem is None and one.manifest is not None and one.manifest.run == run)
        valid = sorted(ours, key=lambda one: -one.step)
        if self.keep_requested:
            valid = [one for one in valid if one.manifest is not None and one.manifest.unrequested]
        if self.keep is None or len(valid) <= self.keep:
            return []
        wanted = {saved, *pinned} & {one.step for one in valid}
        others = [one.step for one in valid if one.step not in wanted]
        wanted |= set(others[: max(0, self.keep - len(wanted))])
        if self.keep_every is not None:
            wanted |= {one.step for one in valid if one.step % self.keep_every == 0}
        if self.best is not None:
            metric, mode = self.best
            scored = [
                (one.manifest.metrics[metric], one.step)
                for one in valid
                if one.manifest is not None and metric in one.manifest.metrics
            ]
            if scored:
                wanted.add((min if mode == "min" else max)(scored)[1])
        return [one for one in reversed(valid) if one.step not in wanted]


def hide_unless_read(disk: Disk, path: Path) -> Path | None:
    """Take a checkpoint's name away; what is left to remove, or None where somebody reads it."""
    with _nobody_reads(path) as free:
        return commit.hide(disk, path) if free else None


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """While inside, retention (of this or another process) leaves the checkpoint alone."""
    try:
        fd = os.open(path / MANIFEST, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:  # foreign: there is nothing to lock, and retention counts it like the others
        yield
        return
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        yield
    finally:
        os.close(fd)


@contextlib.contextmanager
def _nobody_reads(path: Path) -> Iterator[bool]:
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
